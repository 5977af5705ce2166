"""A third-party package with one component of each kind; `tests/cli/test_third_party.py` installs it."""
