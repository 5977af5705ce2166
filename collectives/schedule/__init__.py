"""Describe as data which messages ranks send to each other in a sum over ranks, and execute that description."""
