"""Payloads (encoded tensors), and the collectives that sum them over ranks; needs torch, but not the benchmark.

Import a collective from its file, `from collectives.allreduce import Ring`, and payloads from `collectives.payloads`.
"""
