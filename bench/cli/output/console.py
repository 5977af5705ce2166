"""Where data goes: stdout, as tables for people or JSON for programs."""

from __future__ import annotations

import json
import os
from typing import Any

from rich.console import Console

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
