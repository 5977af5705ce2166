"""The code that runs in each rank. The launcher runs `python -m bench.rank.worker`, without importing this package."""
