"""The published systems on their own terms: sweeps, and from their rows one page per system.

`python -m benchmarks.published` runs every sweep of `examples/published/` (what is done is not done again), writes its
rows to `results/reference/published/` and the pages beside them. No figure of a page is typed: each is computed from a
CSV file.
"""
