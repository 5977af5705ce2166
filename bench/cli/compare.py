"""`bench compare`: runs side by side, with what may be said about speed and accuracy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bench.core.errors import NothingToCompare, Regression, UsageError

if TYPE_CHECKING:
    from bench.report.comparison import Comparison
    from bench.report.tables import Table

Format = Literal["rich", "markdown", "csv", "json"]

MEANING = "Meaning"
OUTPUT = "Output"
GATES = "Gates"
EXAMPLES = """[bold]Examples[/bold]

  bench compare

  bench compare results/runs/2026*-demo-* --baseline bf16

  bench compare old.csv results/runs --by git_sha --metric step_time_s

  bench compare --metric time_to_target_s --out table.md

  bench compare --fail-on slower:5% --fail-on accuracy:1"""

DEFAULT_PATH = Path("results/runs")
_SUFFIXES: dict[str, Format] = {".md": "markdown", ".csv": "csv", ".json": "json"}


def _complete_metric(incomplete: str) -> list[tuple[str, str]]:
    from bench.core.schema import METRICS

    return [(c.name, c.meaning) for c in METRICS if c.better and c.name.startswith(incomplete)]


def _complete_column(incomplete: str) -> list[tuple[str, str]]:
    from bench.core.schema import METRICS

    return [(c.name, c.meaning) for c in METRICS if c.name.startswith(incomplete)]


def compare(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help=f"Run folders, folders of runs, CSV files, or quoted patterns of these (default: {DEFAULT_PATH}).",
            metavar="PATHS",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Row that the others are compared with: a compressor, COMPRESSOR+COLLECTIVE, or a run's name "
            "(default: none, on native).",
            metavar="SPEC",
            show_default=False,
            rich_help_panel=MEANING,
        ),
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            help="Column that the verdict is about.",
            metavar="COLUMN",
            autocompletion=_complete_metric,
            rich_help_panel=MEANING,
        ),
    ] = "samples_per_s",
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Group by these columns, separated by commas (default: everything but the seed).",
            metavar="COLUMNS",
            show_default=False,
            autocompletion=_complete_column,
            rich_help_panel=MEANING,
        ),
    ] = None,
    allow_other_machine: Annotated[
        bool,
        typer.Option(
            "--allow-other-machine",
            help="Do not warn when rows come from different machines.",
            rich_help_panel=MEANING,
        ),
    ] = False,
    as_format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="How to write the table (default: rich, or the suffix of --out); CSV and JSON hold raw numbers "
            "in seconds, bytes and shares.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.", rich_help_panel=OUTPUT)] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the table to this file instead.", metavar="FILE", rich_help_panel=OUTPUT),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit with code 5 if a row is significantly worse than the baseline by more than this: "
            "slower:5% (of the metric) or accuracy:1 (percentage points). May be repeated.",
            metavar="GATE",
            rich_help_panel=GATES,
        ),
    ] = None,
) -> None:
    """Put runs side by side: one row per configuration, against a baseline.

    The direction is always baseline -> row, and above 1x is better; brackets are 95% intervals over seeds.

    Faster or slower means significant and beyond 5%; with a single seed the verdict is always unclear.
    """
    from bench.report import caveats, comparison, comparison_table, gates, store

    chosen_format = _format(as_format, as_json, out)
    limits = [gates.Gate.parse(text) for text in fail_on or []]
    columns = [name.strip() for text in by or [] for name in text.split(",")]

    rows = store.load(paths or [DEFAULT_PATH], warn=_warn)
    compared = comparison.compare(rows, baseline=baseline, metric=metric, by=columns)
    warnings = caveats.caveats(compared, allow_other_machine=allow_other_machine)
    judged = gates.check(compared, limits)
    warnings += judged.undecided

    _write(comparison_table.comparison_table(compared), compared, warnings, chosen_format, out)
    for sentence in warnings:
        _warn(sentence)
    if judged.crossed:
        raise Regression("; ".join(judged.crossed))
    if judged.unmeasured:
        raise NothingToCompare("; ".join(judged.unmeasured))


def _format(chosen: Format | None, as_json: bool, out: Path | None) -> Format:
    if as_json and chosen not in (None, "json"):
        raise UsageError(f"--json and --format {chosen} contradict each other; give one of them")
    if as_json:
        return "json"
    return chosen or _SUFFIXES.get(out.suffix.lower() if out else "", "rich")


def _write(table: Table, compared: Comparison, warnings: list[str], chosen: Format, out: Path | None) -> None:
    if out:
        if out.is_fifo():
            raise UsageError(f"{out} is a pipe, which may wait for a reader for ever; choose another --out")
        try:
            out.write_text(_text(table, compared, warnings, chosen), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {out}: {error.strerror or error}; choose another --out") from None
        typer.echo(f"wrote {out}", err=True)
    elif chosen == "rich":
        from bench.cli.console import stdout_console
        from bench.report.tables import print_rich

        print_rich(table, stdout_console())
    else:
        typer.echo(_text(table, compared, warnings, chosen), nl=False)
    sys.stdout.flush()  # the warnings on stderr belong beneath the table


def _text(table: Table, compared: Comparison, warnings: list[str], chosen: Format) -> str:
    from bench.report import comparison_table, tables

    match chosen:
        case "csv":
            return tables.to_csv(table)
        case "json":
            return tables.to_json(
                table,
                metric=compared.metric.name,
                baseline=compared.baseline.title,
                settings=comparison_table.shared_settings(compared),
                warnings=warnings,
            )
        case "markdown":
            return "\n".join([tables.to_markdown(table), *(f"- warning: {sentence}" for sentence in warnings), ""])
        case "rich":
            return tables.to_text(table)


def _warn(sentence: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(f"warning: {sentence}", style="yellow"), soft_wrap=True)
