"""Attacks that anyone can repeat; each is a program with a seed, and what it finds becomes a test of its own."""
