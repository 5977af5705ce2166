"""Local steps: every rank trains alone for some steps, then the ranks exchange how far their parameters moved."""
