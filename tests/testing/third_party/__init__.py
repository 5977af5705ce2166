"""A package of somebody else's with one component of each kind; `tests/cli/test_third_party.py` installs it."""
