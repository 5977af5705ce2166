"""Write the table of `bench run`'s options into docs/options.md: ``python -m bench.cli.defaults_doc``.

A test fails if the page does not match the program.
"""

from __future__ import annotations

import inspect
import itertools
import typing
from pathlib import Path
from typing import Any, Literal

import typer
from typer.models import OptionInfo

from bench.cli.run import run
from collectives.options import value_text

PAGE = Path("docs/options.md")
BEGIN = "<!-- Written by `python -m bench.cli.defaults_doc`; edit the options, not this table. -->\n"
END = "<!-- End of the table. -->\n"


def table() -> str:
    """Return a Markdown table of the options of `bench run`, in the order of its help."""
    options = list(_options())
    lines = ["| Option | Default | Meaning |", "| :--- | :--- | :--- |"]
    for panel, members in itertools.groupby(options, key=lambda option: option[2].rich_help_panel):
        lines.append(f"| **{panel}** | | |")
        lines += [_row(*option) for option in members]
    return "\n".join(lines) + "\n"


def document(text: str) -> str:
    """Return the page's text with a new table between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _options() -> typing.Iterator[tuple[inspect.Parameter, Any, OptionInfo]]:
    """Yield the parameter, its type without annotations and its Typer option, for every option."""
    for parameter in inspect.signature(run).parameters.values():
        if parameter.annotation is not typer.Context:
            bare, info = typing.get_args(parameter.annotation)
            yield parameter, bare, info


def _row(parameter: inspect.Parameter, type_: Any, info: OptionInfo) -> str:
    meaning = info.help or ""
    if isinstance(info.show_default, str):
        default = info.show_default
    elif parameter.default is None:
        default = "none"
    elif isinstance(parameter.default, bool):
        default = "yes" if parameter.default else "no"
    else:
        values = parameter.default if isinstance(parameter.default, list) else [parameter.default]
        default = f"`{','.join(map(value_text, values))}`"
    return f"| {_names(parameter.name, type_, info)} | {default} | {meaning}{_choices(type_, meaning)} |"


def _names(name: str, type_: Any, info: OptionInfo) -> str:
    # Typer keeps the first name given in `Annotated[..., Option("--json")]` where a default value would stand.
    given = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str)]
    option = f"--{name.replace('_', '-')}"
    names = given or ([option, f"--no-{option[2:]}"] if type_ is bool else [option])
    return ", ".join(f"`{name}`" for name in names)


def _choices(type_: Any, meaning: str) -> str:
    """Return a sentence with the permitted values, unless the meaning names each of them."""
    choices = typing.get_args(type_) if typing.get_origin(type_) is Literal else ()
    return "" if all(choice in meaning for choice in choices) else f" One of {', '.join(choices)}."


if __name__ == "__main__":
    PAGE.write_text(document(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
