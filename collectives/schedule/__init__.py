"""Descriptions, as data, of the messages that ranks send to each other in a sum, and functions that execute them."""
