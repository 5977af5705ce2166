"""Decide whether compression makes training finish sooner on a link (`bench decide`).

Seeds are added until the answer is clear.
"""
