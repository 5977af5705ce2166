"""`bench.predict` and `bench.profile`: call an extension's command from Python, with its options as keywords.

The command is found by entry point and parses the keywords as its own options. The result is what it prints with
`--json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer.main

from bench.api.keywords import by_option_name
from bench.cli.app import app, shown_error
from bench.cli.console import kept_json
from bench.core.errors import UsageError
from bench.launch.jobs.failure import clear_away
from collectives.options import value_text

if TYPE_CHECKING:
    import pandas as pd

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The result of a command; `print` shows it as a table of text, and a notebook as an HTML table.

    Attributes:
        data: the content of the command's JSON; ``found["step_time_s"]`` reads it.
    """

    data: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return a value of `data`."""
        return self.data[name]

    @property
    def notes(self) -> list[str]:
        """The sentences that the command prints below its table."""
        return list(self.data.get("notes", []))

    @property
    def rows(self) -> pd.DataFrame:
        """The rows of the table, such as the ranking of compressors; a single prediction is one row."""
        import pandas as pd

        tables = (value for value in self.data.values() if isinstance(value, list) and value)
        single = [{name: value for name, value in self.data.items() if not isinstance(value, (list, dict))}]
        return pd.DataFrame(next((rows for rows in tables if all(map(_is_flat, rows))), single))

    def __repr__(self) -> str:
        return "\n".join([self._shown().to_string(), *self.notes])

    def _repr_html_(self) -> str:
        return "\n".join([self._shown().to_html(), *(f"<p>{html.escape(note)}</p>" for note in self.notes)])

    def _shown(self) -> pd.DataFrame:
        # Of several rows, show the columns that differ.
        rows = self.rows
        return rows.T if len(rows) == 1 else rows.loc[:, [len(rows[name].map(str).unique()) > 1 for name in rows]]


def _is_flat(row: object) -> bool:
    return isinstance(row, dict) and not any(isinstance(value, (list, dict)) for value in row.values())


def _command(name: str) -> Any:
    """Return a command of `bench`.

    Raises:
        UsageError: the command's extension is not installed.
    """
    group: Any = typer.main.get_command(app)
    return group.get_command(None, name)


def _options(command: Any) -> dict[str, Any]:
    # Return the options by keyword, except --json and --help.
    return {
        each.opts[0].removeprefix("--").replace("-", "_"): each
        for each in command.params
        if each.param_type_name == "option" and each.opts[0] != "--json"
    }


def _takes_options_of_command(function: F) -> F:
    """Decorate a function so that `help` and completion show the options of the command with its name."""
    with contextlib.suppress(UsageError):  # without the extension, the call says so
        own = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [
            inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=option.default)
            for keyword, option in _options(_command(function.__name__)).items()
        ]
        vars(function)["__signature__"] = inspect.Signature([*own, *options])
    return function


@_takes_options_of_command
def predict(**options: Any) -> Found:
    """Predict the time and bytes of training steps like `bench predict`.

    Args:
        options: the options of `bench predict`, with underscores: ``calibration="resnet20.json"``.

    Returns:
        The prediction, or the ranking, curve, map or validation, in the units of the JSON: seconds, bytes, bit/s.

    Raises:
        UsageError: an option is unknown or not possible, or the extension is not installed.
    """
    return _call(predict, [], options)


@_takes_options_of_command
def profile(script: str | Path, arguments: Sequence[object] = (), **options: Any) -> Found:
    """Measure the steps of a training script like `bench profile`, and write them to a file for `predict`.

    Args:
        script: the training script, as for torchrun.
        arguments: the script's arguments.
        options: the options of `bench profile`, with underscores: ``world_size=4``.

    Returns:
        The content of the file: seconds of a step's parts, and of the encoding by each compressor.

    Raises:
        UsageError: an option is not possible, the script cannot be profiled, or the extension is not installed.
        RunFailed: the script failed.
    """
    return _call(profile, [os.fspath(script), *map(str, arguments)], options)


def _call(function: Callable[..., Found], positional: list[str], given: Mapping[str, Any]) -> Found:
    command = _command(function.__name__)
    known = _options(command)
    by_option_name(given, function, known)  # refuses unknown keywords
    words = [word for keyword, value in given.items() for word in _words(known[keyword], value)]
    clear_away()
    try:
        with kept_json() as kept, command.make_context(f"bench {command.name}", [*words, "--json", *positional]) as ctx:
            command.invoke(ctx)
    except BaseException as error:
        message = getattr(error, "format_message", None)  # of what Click refuses; Typer exports no base class of these
        shown = UsageError(message()) if message else shown_error(error)
        if shown is None:
            raise
        raise shown from None
    return Found(kept[0])


def _words(option: Any, value: Any) -> list[str]:
    # Return an option with its value as on the command line; nothing for None.
    if value is None:
        return []
    if option.is_flag and isinstance(value, bool):
        return [option.opts[0]] if value else option.secondary_opts[:1]
    values = value if isinstance(value, (list, tuple)) else [value]
    texts = [os.fspath(each) if isinstance(each, os.PathLike) else value_text(each) for each in values]
    return [f"{option.opts[0]}={text}" for text in (texts if option.multiple else [",".join(texts)])]
