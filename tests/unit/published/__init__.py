"""The pages of the published systems: their rule, their sweeps, and what they say of made-up rows."""
