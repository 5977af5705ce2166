"""Write options as a table of a sweep file, or as arguments of `bench run`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bench.core.config.run import RunConfig
from bench.launch.sweeps.file import options_by_key


def toml_table(heading: str, options: Mapping[str, Any]) -> str:
    """Return a table of a sweep file: its heading, and one line per option."""
    keys = {name: key for key, name in options_by_key().items()}
    # JSON strings, numbers and booleans are also valid TOML.
    lines = [f"{keys.get(name, name)} = {json.dumps(value)}" for name, value in options.items()]
    return "\n".join([heading, *lines]) + "\n"


def run_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `bench run` that set these options."""
    flags = {option.name: option.flag_name for option in RunConfig.options()}
    without_no = {option.name for option in RunConfig.options() if option.flag and option.flag.name}
    arguments = []
    for name, value in options.items():
        flag = flags.get(name, f"--{name}")
        if isinstance(value, bool):
            if value or name not in without_no:  # those have no --no- form and are off by default
                arguments.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            arguments += [flag, str(value)]
    return arguments
