"""The pages of the published systems: their rule for verdicts, their sweeps, and their text for artificial rows."""
