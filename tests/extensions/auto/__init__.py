"""`auto`, on steps that take what a test says."""
