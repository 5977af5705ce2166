"""Decide until the answer is clear whether compression makes training finish sooner on a link: `bench decide`."""
