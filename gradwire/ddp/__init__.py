"""Compressed gradients of a model in DistributedDataParallel; see `gradwire.attach`."""
