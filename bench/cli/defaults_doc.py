"""Write the table of `bench run`'s options into docs/options.md: ``python -m bench.cli.defaults_doc``.

A test fails if the page does not match the program.
"""

import inspect
import itertools
import typing
from pathlib import Path
from typing import Literal

import typer

from bench.cli.run import run
from collectives.options import value_text

PAGE = Path("docs/options.md")
BEGIN = "<!-- Written by `python -m bench.cli.defaults_doc`; edit the options, not this table. -->\n"
END = "<!-- End of the table. -->\n"


def table() -> str:
    """Return a Markdown table of the options of `bench run`, in the order of its help."""
    lines = ["| Option | Default | Meaning |", "| :--- | :--- | :--- |"]
    parameters = [each for each in inspect.signature(run).parameters.values() if each.annotation is not typer.Context]
    for panel, members in itertools.groupby(parameters, lambda each: each.annotation.__metadata__[0].rich_help_panel):
        lines += [f"| **{panel}** | | |", *map(_row, members)]
    return "\n".join(lines) + "\n"


def document(text: str) -> str:
    """Return the text of the page with a new table between `BEGIN` and `END`.

    Args:
        text: the text of the page with the old table.
    """
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _row(parameter: inspect.Parameter) -> str:
    type_, info = typing.get_args(parameter.annotation)
    if isinstance(info.show_default, str):
        default = info.show_default
    elif parameter.default is None:
        default = "none"
    elif isinstance(parameter.default, bool):
        default = "yes" if parameter.default else "no"
    else:
        values = parameter.default if isinstance(parameter.default, list) else [parameter.default]
        default = f"`{','.join(map(value_text, values))}`"
    # Typer keeps the first name given in `Annotated[..., Option("--json")]` where a default value would stand.
    given = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str)]
    option = parameter.name.replace("_", "-")
    names = given or ([f"--{option}", f"--no-{option}"] if type_ is bool else [f"--{option}"])
    choices = typing.get_args(type_) if typing.get_origin(type_) is Literal else ()
    is_said = all(choice in (info.help or "") for choice in choices)
    meaning = (info.help or "") + ("" if is_said else f" One of {', '.join(choices)}.")
    return f"| {', '.join(f'`{name}`' for name in names)} | {default} | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(document(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
