"""Triton versions of functions in the parent package: each module has its namesake's functions and their kernels."""
