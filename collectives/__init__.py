"""Payloads (encoded tensors), and the collectives that sum payloads over ranks; this package does not need `bench`.

Import a collective from its file, `from collectives.allreduce import Ring`, and payloads from `collectives.payloads`.
"""
