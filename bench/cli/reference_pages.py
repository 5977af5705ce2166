"""Write the files that repeat the declarations of options and columns: ``python -m bench.cli.reference_pages``.

The files are docs/options.md, of which only the table is written, docs/columns.md, and bench/api/run_options.pyi, which
contains the types of the keywords of `bench.run`. A test fails if a file does not match the declarations.
"""

import inspect
import itertools
import typing
from pathlib import Path
from typing import Literal

import typer

from bench.api.keywords import KEYWORDS
from bench.cli.run import run
from bench.core.columns import Column
from bench.core.config.configuration import CommandOption
from bench.core.schema import LAYERS, LINKS, METRICS, PARTITION
from collectives.options import value_text

OPTIONS, COLUMNS = Path("docs/options.md"), Path("docs/columns.md")
KEYWORD_TYPES = Path("bench/api/run_options.pyi")

BEGIN = "<!-- Written by `python -m bench.cli.reference_pages`; edit the options, not this table. -->\n"
END = "<!-- End of the table. -->\n"


def options_page(text: str) -> str:
    """Return the text of docs/options.md with a new table of the options of `bench run`, in the order of its help.

    Args:
        text: the text of the page with the old table between `BEGIN` and `END`.
    """
    lines = ["| Option | Default | Meaning |", "| :--- | :--- | :--- |"]
    parameters = [each for each in inspect.signature(run).parameters.values() if each.annotation is not typer.Context]
    for panel, members in itertools.groupby(parameters, lambda each: each.annotation.__metadata__[0].rich_help_panel):
        lines += [f"| **{panel}** | | |", *map(_option_row, members)]
    table = "\n".join(lines)
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{table}\n\n{END}{after}"


def _option_row(parameter: inspect.Parameter) -> str:
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


_TEMPLATE = """\
<!-- Written by `python -m bench.cli.reference_pages` from bench/core/schema.py; edit that file, not this page. -->

# Columns of the CSV files

This page lists every column that a run writes, with its unit and its meaning.

| File | One row per | Written by |
| :--- | :--- | :--- |
| [`metrics.csv`](#metricscsv) | evaluation, and one at the end of every run | `bench run`, `sweep`, `tune` |
| [`layers.csv`](#layerscsv) | layer and evaluation | the same |
| [`links.csv`](#linkscsv) | pair of processes and evaluation | `bench run --strategy placed` |
| [`partition.csv`](#partitioncsv) | rank and class | `bench run`, `sweep`, `tune` |

## How to read the columns

- Units are in the name: `_s` seconds, `_bytes` bytes, `_per_s` per second, `_bps` bits per second, `_Bps` bytes per
  second. Accuracies, densities and other shares run from 0 to 1.
- An empty cell means "not measured" or "does not apply". Flags are `true` and `false`.
- Times of a step are those of rank 0. `samples_per_s` adds up the rates of all ranks.
- *Better* says which direction is an improvement. `bench compare --metric` takes only columns with a direction.
- *Repeats* means that two runs with the same configuration and seed on the same machine agree in this column.
- Components are written `name:key=value`, with only the options that differ from their default.
- Later versions may add columns. All readers accept files with fewer or more columns, and files made by concatenating
  both.

## Read the files with pandas

Every row of `metrics.csv` names its experiment, machine and code version, so you can concatenate the tables of any
runs. [`bench.load`](api.md#run-decide-compare-predict) does so, and gives every column its type:

```python
import bench

runs = bench.load("results/runs")
last = runs[runs["status"] == "ok"].groupby("run_id").last()
of_methods = last.groupby(["compressor", "collective"])
print(of_methods[["test_accuracy", "samples_per_s"]].agg(["mean", "std", "count"]))
```

`bench.compare` and `bench compare --json` add intervals, a baseline and warnings.

## metrics.csv

{metrics}
## layers.csv

{layers}
## links.csv

Traffic between the processes of a run with `--strategy placed`. Other runs do not have this file.

{links}
## partition.csv

Each rank's training samples by class, as [`--partition`](workloads.md#data-that-differ-between-ranks) divides them.
Runs on samples without classes do not have this file.

{partition}"""


def columns_page() -> str:
    """Return the whole text of docs/columns.md."""
    return _TEMPLATE.format(
        metrics=sections(METRICS),
        layers=sections(LAYERS),
        links=sections(LINKS),
        partition=sections(PARTITION),
    )


def keyword_types() -> str:
    """Return the whole text of bench/api/run_options.pyi."""
    lines = [f"    {keyword}: {_type_text(each)}" for keyword, each in KEYWORDS.items() if keyword != "compressor"]
    return "\n".join([_KEYWORD_TYPES, *lines, ""])


_KEYWORD_TYPES = '''\
"""Types of the keywords of `bench.run`, written by `python -m bench.cli.reference_pages`; edit the options instead."""

from typing import Literal, TypedDict

class RunOptions(TypedDict, total=False):
    """Options of `bench run`, except the compressor, which can be several."""
'''


def _type_text(option: CommandOption) -> str:
    choices = ", ".join(f'"{choice}"' for choice in typing.get_args(option.value_type))
    is_choice = typing.get_origin(option.value_type) is Literal
    return f"Literal[{choices}]" if is_choice else f"{option.cell_type.__name__}{' | None' * (option.default is None)}"


def sections(columns: tuple[Column, ...]) -> str:
    """Return a heading and a table for each group of columns."""
    return "\n".join(
        f"### {group.capitalize()}\n\n{_columns_table(tuple(members))}"
        for group, members in itertools.groupby(columns, key=lambda column: column.group)
    )


def _columns_table(columns: tuple[Column, ...]) -> str:
    lines = ["| Column | Meaning | Unit | Better | Repeats | Type |", "| :--- | :--- | :--- | :--- | :--- | :--- |"]
    for column in columns:
        repeats = "yes" if column.deterministic else ""
        meaning = column.meaning.replace("|", r"\|")
        cells = (f"`{column.name}`", meaning, column.unit, column.better, repeats, column.type.__name__)
        lines.append("|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OPTIONS.write_text(options_page(OPTIONS.read_text(encoding="utf-8")), encoding="utf-8")
    COLUMNS.write_text(columns_page(), encoding="utf-8")
