"""The compressor `auto`: tries compressor-collective pairs during training and chooses one for each layer."""
