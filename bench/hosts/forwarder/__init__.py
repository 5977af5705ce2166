"""A user-space switch between virtual hosts, for traces and jitter, and for latency and loss without netem."""
