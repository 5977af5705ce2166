"""Describe as data which rank sends what to which rank in a sum, and execute it."""
