"""The floor of bench: configuration, component names, the schema of results, errors and units. Imports no torch."""
