"""A user-space switch between virtual hosts: latency, jitter, loss and traces where the kernel has no netem."""
