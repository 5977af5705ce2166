"""Where data goes: stdout, as tables for people or JSON for programs."""

from __future__ import annotations

import json
import os
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_PIPED_WIDTH = 200


def stdout_console() -> Console:
    """A console on stdout; into a pipe or file it writes wide lines, so that `grep` finds a row whole."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def print_json(value: Any) -> None:
    """One JSON document on stdout, indented."""
    print(json.dumps(value, indent=2))


def plain_table(title: str | None = None) -> Table:
    """A table with a line below its heading and none around it; columns and rows are still to be added."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
