"""Code that all packages of bench share: configurations, component names, result columns, errors, units; no torch."""
