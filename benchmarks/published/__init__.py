"""Check the claims of four published systems: run the sweeps of each, and write one page per system from the rows.

`python -m benchmarks.published` runs every sweep of `examples/published/`, except runs that are already finished, and
writes rows and pages to `results/reference/published/`. Every figure of a page is computed from a CSV file.
"""
