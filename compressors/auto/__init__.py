"""The compressor `auto`: tries pairs of compressor and collective during training and chooses one for each layer."""
