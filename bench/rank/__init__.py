"""The code that runs in each rank. The launcher starts `python -m bench.rank.worker` and imports nothing from here."""
