"""Hold the figures in README.md, docs/ and results/reference/*.md against the committed rows.

`python -m benchmarks.prose` prints every sentence whose figures are not those of the rows, with file and line, and then
exits with 1. With `--write` it puts the figures of the rows in their place.
"""
