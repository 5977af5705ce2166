"""Local steps: every rank trains alone for some steps, then ranks exchange how far they moved."""
