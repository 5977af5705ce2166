"""Worker processes of `bench collectives` and `bench compressors`; started by module name, never imported by them."""
