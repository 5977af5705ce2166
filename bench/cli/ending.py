"""How a command ends: an error becomes one sentence and an exit code; a bug keeps its traceback."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

from bench.core.environment import failure_to_import_torch
from bench.core.errors import BenchError, Interrupted, RunFailed, UsageError

# What the user's own words bring about: a path that leads in a circle, is too long, or is not for this user.
_USERS = {errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
# What the machine is short of.
_MACHINES = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
}  # fmt: skip


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Run a command; what goes wrong is told on stderr in one sentence, and the program ends with its exit code."""
    _show_any_sign()
    try:
        _check_working_directory()
        yield
        sys.stdout.flush()  # a full disk shows here rather than after the end
    except BaseException as error:
        told = as_told(error)
        if told is None:
            raise
        _write_no_more()
        with contextlib.suppress(OSError):  # nobody can be told that stderr takes nothing; the exit code remains
            print(f"bench: {told}", file=sys.stderr)
        sys.exit(told.exit_code)


def as_told(error: BaseException) -> BenchError | None:
    """What the user is told of an error; None for a bug, and for an exit that was meant."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        error = error.__context__  # Typer and rich exit with 1 where the reader of stdout has gone
    match error:
        case BenchError():
            return error
        case KeyboardInterrupt():
            return Interrupted("interrupted")
        case BrokenPipeError():
            return RunFailed("whatever read the output ended before all of it was written")
        case OSError() if error.errno in _USERS:
            return UsageError(f"{_place(error)}: {error.strerror}; give another path")
        case OSError() if error.errno in _MACHINES:
            return RunFailed(f"{_place(error)}: {error.strerror}; make room and try again")
    return failure_to_import_torch(error)


def _place(error: OSError) -> str:
    return "the output cannot be written" if error.filename is None else f"{error.filename} cannot be used"


def _show_any_sign() -> None:
    """A terminal whose encoding lacks a sign shows its number."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _check_working_directory() -> None:
    try:
        os.getcwd()  # noqa: PTH109 - the same
    except FileNotFoundError:
        raise UsageError("the working directory no longer exists; change to another one") from None


def _write_no_more() -> None:
    """What stdout did not take would be tried again, in vain, when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
