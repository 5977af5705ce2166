"""Write docs/columns.md from the schema: ``python -m bench.report.columns_doc``.

A test fails if the page does not match the schema.
"""

import itertools
from pathlib import Path

from bench.core.schema.column import Column
from bench.core.schema.metrics import LAYERS, LINKS, METRICS

PAGE = Path("docs/columns.md")

_TEMPLATE = """\
<!-- Written by `python -m bench.report.columns_doc` from bench/core/schema/; edit those, not this page. -->

# Columns of the CSV files

This page lists every column that a run writes, with its unit and its meaning.

| File | One row per | Written by |
| :--- | :--- | :--- |
| [`metrics.csv`](#metricscsv) | evaluation, and one at the end of every run | `bench run`, `sweep`, `tune` |
| [`layers.csv`](#layerscsv) | layer and evaluation | the same |
| [`links.csv`](#linkscsv) | pair of processes and evaluation | `bench run --strategy placed` |

## How to read the columns

- Units are in the name: `_s` seconds, `_bytes` bytes, `_per_s` per second, `_bps` bits per second, `_Bps` bytes per
  second. Accuracies, densities and other shares run from 0 to 1.
- An empty cell means "not measured" or "does not apply". Flags are `true` and `false`.
- Times of a step are those of rank 0. `samples_per_s` adds up the rates of all ranks.
- *Better* says which direction is an improvement. `bench compare --metric` takes only columns that have one.
- *Repeats* means that two runs with the same configuration and seed on the same machine agree in this column.
- Components are written `name:key=value`, with only the options that differ from their default.
- Later versions may add columns. All readers accept files with fewer or more columns, and files made by concatenating
  both.

## Read the files with pandas

Every row of `metrics.csv` names its experiment, machine and code version, so you can concatenate the tables of any
runs:

```python
from pathlib import Path

import pandas as pd

ids = {{"digest": str, "config_id": str}}  # some look like numbers
runs = pd.concat(pd.read_csv(path, dtype=ids) for path in Path("results/runs").glob("*/metrics.csv"))
last = runs[runs["status"] == "ok"].groupby("run_id").last()
of_methods = last.groupby(["compressor", "collective"])
print(of_methods[["test_accuracy", "samples_per_s"]].agg(["mean", "std", "count"]))
```

`bench compare` adds intervals, a baseline and warnings; `bench compare --format csv` writes raw numbers.

## metrics.csv

{metrics}
## layers.csv

{layers}
## links.csv

Traffic between the processes of a run with `--strategy placed`. Other runs do not have this file.

{links}"""


def document() -> str:
    """Return the whole text of docs/columns.md."""
    return _TEMPLATE.format(
        metrics=sections(METRICS),
        layers=sections(LAYERS),
        links=sections(LINKS),
    )


def sections(columns: tuple[Column, ...]) -> str:
    """Return a heading and a table for each group of columns."""
    return "\n".join(
        f"### {group.capitalize()}\n\n{_table(tuple(members))}"
        for group, members in itertools.groupby(columns, key=lambda column: column.group)
    )


def _table(columns: tuple[Column, ...]) -> str:
    lines = ["| Column | Meaning | Unit | Better | Repeats | Type |", "| :--- | :--- | :--- | :--- | :--- | :--- |"]
    for column in columns:
        repeats = "yes" if column.deterministic else ""
        meaning = column.meaning.replace("|", r"\|")
        cells = (f"`{column.name}`", meaning, column.unit, column.better, repeats, column.type.__name__)
        lines.append("|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
