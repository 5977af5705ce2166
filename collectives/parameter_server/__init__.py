"""Parameters that one rank holds and all others push to and pull from, each at its own speed."""
