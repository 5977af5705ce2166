"""Which part of a network runs on which device: the network as a graph of operations, and their roles by type."""
