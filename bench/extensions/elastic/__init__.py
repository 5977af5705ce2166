"""Ranks that train with local steps and may be lost and return: the strategy `elastic`."""
