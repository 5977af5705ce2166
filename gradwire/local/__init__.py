"""Local steps: every rank trains alone for some steps, then ranks average how far their parameters have moved."""
