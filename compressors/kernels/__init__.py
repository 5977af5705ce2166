"""Loops over elements that compressors share: selection, quantisation and random numbers."""
