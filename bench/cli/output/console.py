"""Print data on stdout, as tables for people or JSON for programs."""

from __future__ import annotations

import json
import os
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_PIPED_WIDTH = 200


def stdout_console() -> Console:
    """Return a console on stdout; in a pipe or file its lines are wide, so that `grep` finds complete rows."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))


def plain_table(title: str | None = None) -> Table:
    """Return an empty table with a line below its heading and no frame."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
