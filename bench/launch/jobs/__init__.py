"""Start, watch and stop jobs, which are the processes of one run: detect failures, and record how jobs ended."""
