"""Writes results/README.md from the schema: ``python -m bench.report.columns_doc``; a test holds the file equal."""

from __future__ import annotations

import itertools
from pathlib import Path

from bench.core.schema.collectives import COLLECTIVES
from bench.core.schema.column import Column
from bench.core.schema.compressors import COMPRESSORS
from bench.core.schema.layers import LAYERS
from bench.core.schema.links import LINKS
from bench.core.schema.metrics import METRICS

README = Path("results/README.md")

_TEMPLATE = """\
<!-- Written by `python -m bench.report.columns_doc` from bench/core/schema/; edit those, not this file. -->

# Results

| Folder | What it holds |
| :--- | :--- |
| `results/runs/` | The default output of `bench run`: one new folder per run, never committed. |
| `results/plots/` | The default output of `bench plot`: one file per kind of picture, never committed. |
| `results/reference/` | Committed CSV files behind the figures in the documentation. |

## A run's folder

`results/runs/<utc>-<name>-s<seed>-<digest>/` holds one run, which is one configuration and one seed:

| File | What it holds |
| :--- | :--- |
| `config.json` | The complete configuration, every default filled in. |
| `environment.json` | The machine, versions and the state of the checkout. |
| `metrics.csv` | One row per evaluation, and always one at the end, also for a run that failed. |
| `layers.csv` | One row per layer and evaluation: what was sent for it. |
| `status.json` | How the run ended; written last. |
| `checkpoints/` | The last checkpoint, until the run has come to its end: a file per rank and a manifest. |
| `resume.json` | How often the run has gone on from a checkpoint. |
| `progress.jsonl` | What the progress display reads while the run goes on. |
| `link.json` | What was measured on the links before training (virtual hosts only). |
| `links.csv` | Bytes from process to process (`--strategy placed` only). |
| `choices.jsonl` | What `auto` chose, one choice per line. |
| `model.pt` | The trained weights, with `--save-model`. |
| `trace-rank-N.json` | A Chrome trace per rank, with `--profile`. |
| `tensorboard/` | With `--track tensorboard`. |
| `logs/`, `errors/` | What torchrun and every rank printed; why a rank failed. |

Every row of `metrics.csv` says by itself which experiment, machine and code it belongs to, so tables of any runs can
simply be concatenated:

```python
from pathlib import Path

import pandas as pd

ids = {{"digest": str, "config_id": str}}  # some look like numbers
runs = pd.concat(pd.read_csv(path, dtype=ids) for path in Path("results/runs").glob("*/metrics.csv"))
last = runs[runs["status"] == "ok"].groupby("run_id").last()
print(last.groupby(["compressor", "collective"])[["test_accuracy", "samples_per_s"]].agg(["mean", "std", "count"]))
```

`bench compare` adds intervals, a baseline and warnings; its CSV has raw numbers.

## How to read the columns

- Units are in the name: `_s` seconds, `_bytes` bytes, `_per_s` per second, `_bps` bits per second, `_Bps` bytes per
  second. Accuracies, densities and other shares run from 0 to 1.
- An empty cell means "not measured" or "does not apply"; flags are `true` and `false`.
- Times of a step are those of rank 0; `samples_per_s` counts every rank at its own speed.
- *Better* says which direction a user wants; only such a column can be `bench compare --metric`.
- Components are written `name:key=value`, with only the options that differ from their default.
- *Repeats* says that two runs of one configuration and seed on one machine agree in the column.
- Columns may be added in later versions; readers here take files with fewer or more columns, and files that were put
  together of both.

## metrics.csv

{metrics}
## layers.csv

{layers}
## links.csv

What went from process to process where layers lie on several devices; only such runs have the file.

{links}
## CSV of bench collectives --out

One row per collective, payload and size, as nccl-tests counts; `bench collectives` appends, so files of several calls
need no merging.

{collectives}
## CSV of bench compressors --out

One row per compressor; `bench compressors` appends too, and `started_at` tells the calls apart.

{compressors}"""


def document() -> str:
    """The whole text of results/README.md."""
    return _TEMPLATE.format(
        metrics=_sections(METRICS),
        layers=_sections(LAYERS),
        links=_sections(LINKS),
        collectives=_sections(COLLECTIVES),
        compressors=_sections(COMPRESSORS),
    )


def _sections(columns: tuple[Column, ...]) -> str:
    groups = itertools.groupby(columns, key=lambda column: column.group)
    return "\n".join(f"### {group.capitalize()}\n\n{_table(tuple(members))}" for group, members in groups)


def _table(columns: tuple[Column, ...]) -> str:
    lines = ["| Column | Type | Unit | Better | Repeats | Meaning |", "| :--- | :--- | :--- | :--- | :--- | :--- |"]
    for column in columns:
        repeats = "yes" if column.deterministic else ""
        meaning = column.meaning.replace("|", r"\|")
        cells = (f"`{column.name}`", column.type.__name__, column.unit, column.better, repeats, meaning)
        lines.append("|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    README.write_text(document(), encoding="utf-8")
