"""Measurements of the parts of a step: `bench collectives` times sums, and `bench compressors` times encoding."""
