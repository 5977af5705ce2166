"""`bench trace`, which reads the profiler traces of a distributed training and says where its steps wait."""
