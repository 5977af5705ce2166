"""Start `python -m bench` and the script `bench`; signals are handled before anything slow is imported."""

import os
import sys

from bench.core import processes
from bench.core.waiting import waiting
from gradwire.hidden_packages import LIBRARY, exit_if_hidden


def main() -> None:
    """Check that no other package hides this project's packages, and run the command."""
    exit_if_hidden(LIBRARY)
    processes.end_at_once()
    _open_closed_streams()
    if (command := sys.argv[1:2]) and not command[0].startswith("-") and os.environ.get("RANK", "0") == "0":
        waiting.begin(command[0])
    from bench.cli.app import main as run_command

    run_command()


def _open_closed_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed, so that no other file gets its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    main()
