"""Memory that several ranks map: regions, their layout, and cache lines."""
