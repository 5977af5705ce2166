"""End a command: show an error as one sentence and set the exit code; a bug keeps its traceback."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

from bench.core.environment import failure_to_import_torch
from bench.core.errors import BenchError, Interrupted, RunFailed, UsageError

# Errors about a path that the user gave: a circle of links, a name that is too long, a lack of permissions.
_USERS = {errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
# Errors about a lack of disk space, memory, open files or processes.
_MACHINES = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
}  # fmt: skip


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Run the command in the block; print its error on stderr in one sentence and exit with the error's code."""
    _show_any_sign()
    try:
        _check_working_directory()
        yield
        sys.stdout.flush()  # so that a full disk raises here, not while Python exits
    except BaseException as error:
        shown = as_told(error)
        if shown is None:
            raise
        _write_no_more()
        with contextlib.suppress(OSError):  # stderr cannot be written either; the exit code remains
            print(f"bench: {shown}", file=sys.stderr)
        sys.exit(shown.exit_code)


def as_told(error: BaseException) -> BenchError | None:
    """Return the error to show to the user; None for a bug, and for a deliberate exit."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        error = error.__context__  # Typer and rich exit with code 1 if the reader of stdout has ended
    match error:
        case BenchError():
            return error
        case KeyboardInterrupt():
            return Interrupted("interrupted")
        case BrokenPipeError():
            return RunFailed("the program that reads the output ended before all of it was written")
        case OSError() if error.errno in _USERS:
            return UsageError(f"{_place(error)}: {error.strerror}; give another path")
        case OSError() if error.errno in _MACHINES:
            return RunFailed(f"{_place(error)}: {error.strerror}; make room and try again")
    return failure_to_import_torch(error)


def _place(error: OSError) -> str:
    return "the output cannot be written" if error.filename is None else f"{error.filename} cannot be used"


def _show_any_sign() -> None:
    """Make stdout show the escape sequence of characters that its encoding lacks, rather than fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _check_working_directory() -> None:
    try:
        os.getcwd()  # noqa: PTH109 - the same
    except FileNotFoundError:
        raise UsageError("the working directory no longer exists; change to another one") from None


def _write_no_more() -> None:
    """Discard output that stdout cannot take, because Python would try to write it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
