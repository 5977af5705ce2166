"""Reports: reading results, statistics over seeds, comparison, tables. Imports no torch, and pandas only for data."""
