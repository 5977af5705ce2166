"""The strategy `elastic`: ranks train with local steps, and may be lost and return."""
