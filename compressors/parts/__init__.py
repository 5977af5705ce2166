"""Parts that compressors are composed of."""
