"""Define the Typer application of `bench`, and `main`, the program's entry point."""

import contextlib
import errno
import gc
import io
import os
import sys
from typing import Annotated

import typer

from bench.cli.commands import Commands
from bench.core.environment import failure_to_import_torch, version_of
from bench.core.errors import BenchError, Interrupted, RunFailed, UsageError
from bench.core.waiting import waiting
from bench.launch.jobs.failure import clear_away

# Errors about a path that the user gave: a circle of links, a name that is too long, a lack of permissions.
_USERS = {errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
# Errors about a lack of disk space, memory, open files or processes.
_MACHINES = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
}  # fmt: skip


def shown_error(error: BaseException) -> BenchError | None:
    """Return the error to show to the user for an exception that ends the program.

    Returns:
        None if the exception is a bug or a deliberate exit.
    """
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        error = error.__context__  # Typer and rich exit with code 1 if the reader of stdout has ended
    file = getattr(error, "filename", None)
    place = "the output cannot be written" if file is None else f"{file} cannot be used"
    match error:
        case BenchError():
            return error
        case KeyboardInterrupt():
            return Interrupted("interrupted")
        case BrokenPipeError():
            return RunFailed("the program that reads the output ended before all of it was written")
        case OSError() if error.errno in _USERS:
            return UsageError(f"{place}: {error.strerror}; give another path")
        case OSError() if error.errno in _MACHINES:
            return RunFailed(f"{place}: {error.strerror}; make room and try again")
    return failure_to_import_torch(error)


EXIT_CODES = (
    "Exit codes: 0 ok, 1 bug, 2 wrong usage, 3 run failed, 4 nothing to compare or to judge, 5 regression, "
    "130 interrupted."
)

# Importing torch creates very many objects and no garbage. With the default threshold, garbage collection during the
# import and at exit takes up to a third of the import's time.
IMPORTED_OBJECTS = 100_000

app = typer.Typer(
    name="bench",
    cls=Commands,
    help="Will compressing my gradients make training finish sooner, on my link, without losing accuracy?\n\n"
    "Trains real models in real processes with a chosen compressor x collective x optimizer, and counts "
    "the bytes that leave a rank.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bench {version_of('gradwire')} (torch {version_of('torch') or 'not installed'})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the versions of bench and torch.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Handle the options that stand before the command, and clean up after killed jobs."""
    clear_away()


def main() -> None:
    """Run the command that the user typed.

    If it fails, print its error on stderr in one sentence, and exit with the exit code of the error.
    """
    gc.set_threshold(IMPORTED_OBJECTS)
    if isinstance(sys.stdout, io.TextIOWrapper):  # print characters that the encoding lacks as escape sequences
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            os.getcwd()  # noqa: PTH109 - Path.cwd does the same
        except FileNotFoundError:
            raise UsageError("the working directory no longer exists; change to another one") from None
        app()
        sys.stdout.flush()  # so that a full disk raises here, not while Python exits
    except BaseException as error:
        waiting.end()
        shown = shown_error(error)
        if shown is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # discard what stdout cannot take, because Python would try to write it again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with contextlib.suppress(OSError):  # stderr cannot be written either; the exit code remains
            print(f"bench: {shown}", file=sys.stderr)
        sys.exit(shown.exit_code)
    finally:
        waiting.end()
        gc.freeze()  # no collection at exit, because the process ends anyway
