"""The errors that a user can meet, and the exit code each one ends the program with.

Every message is one sentence that says what is wrong and what to do. Anything else that escapes is a bug (exit code
1) and keeps its traceback.
"""

from __future__ import annotations

from typing import ClassVar


class BenchError(Exception):
    """Base of all errors that are shown without a traceback."""

    exit_code: ClassVar[int] = 1


class UsageError(BenchError):
    """The command line, a configuration or an input file asks for something impossible."""

    exit_code = 2


class RunFailed(BenchError):
    """A run started and did not end well; what it had written is kept."""

    exit_code = 3


class NothingToCompare(BenchError):
    """No readable row was found where results were expected."""

    exit_code = 4


class Regression(BenchError):
    """A gate given by the user was crossed."""

    exit_code = 5


class Interrupted(BenchError):
    """The user stopped the program; the message says what is kept."""

    exit_code = 130
