"""The floor of bench: configurations, component names, result columns, errors, units. Imports no torch."""
