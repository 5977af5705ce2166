"""Loops over elements in C, and how they are built, found and called; without them, plain torch and numpy serve."""
