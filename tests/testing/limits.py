"""How long a test waits for what should come, so that a hang ends in a sentence.

pytest ends a test that takes longer than `timeout` in pyproject.toml, so most waits need no limit of their own. A
transport or a helper that must have one, or that says more than pytest can, takes this one. It is shorter than pytest's
and wide enough for a machine that other work makes many times slower. Only a test of a limit has a shorter one.
"""

LIMIT_S = 480.0
