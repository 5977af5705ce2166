"""What all of bench builds on: configurations, component names, result columns, errors, units. Imports no torch."""
