"""Decide whether compression makes training finish sooner on a link (`bench decide`); add seeds until it is clear."""
