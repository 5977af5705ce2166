"""Payloads, and the collectives that sum them over ranks. This library needs torch, not the benchmark.

Import a collective from its file, `from collectives.ring import Ring`, and payloads from `collectives.payloads`.
"""
