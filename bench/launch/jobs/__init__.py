"""Start, watch and stop jobs: place their ranks, detect failures, and record how they ended."""
