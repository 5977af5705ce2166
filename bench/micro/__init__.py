"""Workers of `bench collectives` and `bench compressors`; started by name, imported by nobody above them."""
