"""Compressed gradients of a model that FSDP2 shards; see `gradwire.attach_fsdp`."""
