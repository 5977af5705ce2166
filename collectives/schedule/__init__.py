"""Rounds of a sum: who sends what to whom, as data, and what carries them out."""
