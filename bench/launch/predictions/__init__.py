"""Predictions: what is asked for, steps at one rate and over many, what is said beside them, and runs to compare."""
