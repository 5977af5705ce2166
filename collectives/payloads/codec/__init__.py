"""Encode the fields of packed payloads: bits, index sets, codebooks and values; generate random numbers."""
