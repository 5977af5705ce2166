"""Inside each rank. A worker is started by name (`python -m bench.train.worker`); nobody above imports this package."""
