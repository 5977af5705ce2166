"""Strategies: what ranks exchange and when; one strategy per file or folder."""
