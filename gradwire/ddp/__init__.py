"""The communication hook of a model in DistributedDataParallel; see `gradwire.attach`."""
