"""Encoding of the fields of packed payloads: bits, index sets, codebooks, values, random numbers."""
