"""The compressor `auto`, which tries compressor-collective pairs during training and chooses one for each layer."""
