"""Output of `bench compare`: its table on the terminal, or in another format on stdout or in a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from bench.core.errors import UsageError

if TYPE_CHECKING:
    from bench.report.comparison import Comparison
    from bench.report.tables import Table

Format = Literal["rich", "markdown", "latex", "csv", "json"]

_SUFFIXES: dict[str, Format] = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".json": "json"}


def choose_format(chosen: Format | None, as_json: bool, out: Path | None) -> Format:
    """Return the requested format, or that of the file's suffix.

    Raises:
        UsageError: --json and another --format are given.
    """
    if as_json and chosen not in (None, "json"):
        raise UsageError(f"--json and --format {chosen} contradict each other; give one of them")
    if as_json:
        return "json"
    return chosen or _SUFFIXES.get(out.suffix.lower() if out else "", "rich")


def write(table: Table, compared: Comparison, warnings: list[str], chosen: Format, out: Path | None) -> None:
    """Write the table, and the warnings on stderr; JSON and Markdown also contain the warnings.

    Raises:
        UsageError: the file cannot be written.
    """
    if out:
        if out.is_fifo():
            raise UsageError(f"{out} is a pipe, which might wait for a reader forever; choose another --out")
        try:
            out.write_text(_text(table, compared, warnings, chosen), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {out}: {error.strerror or error}; choose another --out") from None
        typer.echo(f"wrote {out}", err=True)
    elif chosen == "rich":
        from bench.cli.output.console import stdout_console
        from bench.report.tables import print_rich

        print_rich(table, stdout_console())
    else:
        typer.echo(_text(table, compared, warnings, chosen), nl=False)
    sys.stdout.flush()  # so that the warnings on stderr come after the table
    for sentence in [*warnings, *([] if chosen != "csv" else table.cautions)]:
        warn(sentence)


def warn(sentence: str) -> None:
    """Print a warning on stderr, without line breaks if that is not a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    console.print(Text(f"warning: {sentence}", style="yellow"), soft_wrap=not console.is_terminal)


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
                verdict=list(table.answer),
                warnings=[*table.cautions, *warnings],
            )
        case "markdown":
            return "\n".join([tables.to_markdown(table), *(f"- warning: {sentence}" for sentence in warnings), ""])
        case "latex":
            return tables.to_latex(table)
        case "rich":
            return tables.to_text(table)
