"""Payloads and the ways ranks sum them: a library that knows torch and nothing of benchmarks.

Import a collective from its file, `from collectives.ring import Ring`, payloads from `collectives.payloads`.
"""
