"""Loops over elements that compressors share: selection, quantisation and updates of residuals."""
