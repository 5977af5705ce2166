"""Errors that are shown to the user as one sentence, each with the exit code of the program.

The sentence says what is wrong and what to do. Any other exception is a bug: exit code 1, with a traceback.
"""

from typing import ClassVar

# Values of the column `error_kind`. `DIVERGED`: training diverged on a rank. `FAIL_AGAIN`: a run with such an error
# would fail again if it were resumed.
DIVERGED = "Diverged"
FAIL_AGAIN = frozenset({DIVERGED, "NeverFinite", "NonFiniteGradient"})


class BenchError(Exception):
    """Base of all errors that are shown without a traceback."""

    exit_code: ClassVar[int] = 1


class UsageError(BenchError):
    """The command line, a configuration or an input file asks for something impossible."""

    exit_code = 2


class PluginError(UsageError):
    """A third party's component cannot be used; the message names the component and the reason."""


class RunFailed(BenchError):
    """A run started and failed; the rows written so far are kept."""

    exit_code = 3


class NothingToCompare(BenchError):
    """No readable row was found where results were expected."""

    exit_code = 4


class Regression(BenchError):
    """A limit that the user gave, such as --fail-on, was exceeded."""

    exit_code = 5


class Interrupted(BenchError):
    """The user stopped the program; the message says what is kept."""

    exit_code = 130
