"""`python -m bench` and the `bench` script: signals are handled before anything slow is imported."""

import os
import sys

from bench.core import processes
from gradwire.hidden_packages import LIBRARY, exit_if_hidden


def main() -> None:
    """Run the command, once the packages are known to be this project's."""
    exit_if_hidden(LIBRARY)
    processes.end_at_once()
    _open_closed_streams()
    from bench.cli.app import main as run_command

    run_command()


def _open_closed_streams() -> None:
    """Open what the caller closed of stdin, stdout and stderr on /dev/null, else the next file gets its number."""
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
