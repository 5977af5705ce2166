"""The compressor `auto`: it tries pairs of compressor and collective and chooses one for each layer, while training."""
