"""The Python functions `bench.run`, `bench.load` and `bench.compare`, which share their code with the commands.

Only `bench.cli` and the extensions import this package.
"""
