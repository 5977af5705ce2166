"""Options as they are written: in a sweep file, and on the command line of `bench run`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bench.core.config.run import RunConfig
from bench.launch.sweeps.file import options_by_key


def toml_table(heading: str, options: Mapping[str, Any]) -> str:
    """A table of a sweep file: its heading, and one line per option."""
    keys = {name: key for key, name in options_by_key().items()}
    # JSON's texts, numbers and booleans are TOML's as well.
    lines = [f"{keys.get(name, name)} = {json.dumps(value)}" for name, value in options.items()]
    return "\n".join([heading, *lines]) + "\n"


def run_arguments(options: Mapping[str, Any]) -> list[str]:
    """The arguments of `bench run` that say the same."""
    flags = {option.name: option.flag_name for option in RunConfig.options()}
    without_no = {option.name for option in RunConfig.options() if option.flag and option.flag.name}
    arguments = []
    for name, value in options.items():
        flag = flags.get(name, f"--{name}")
        if isinstance(value, bool):
            if value or name not in without_no:  # such a one is off unless it is given
                arguments.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            arguments += [flag, str(value)]
    return arguments
