"""Ranks: what they compute, and what those on the same cores take from each other."""
