"""Strategy `local`: ranks train alone between exchanges."""
