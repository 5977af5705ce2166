"""The attack, `make attack`: kills, starves and feeds nonsense to every part, by chance from a seed, and counts."""
