"""Sweeps: from a file to its runs, those of them that are done, and the others done once."""
