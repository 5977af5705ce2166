"""Data sets, one component per file; importing this package imports none of them."""
