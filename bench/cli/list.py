"""`bench list`, which shows components, their options, which pairs work together, and runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.cli.list_runs import list_runs
from bench.cli.output.console import print_json, stdout_console
from bench.core import registry
from bench.core.errors import UsageError
from collectives.options import did_you_mean

if TYPE_CHECKING:
    from bench.cli.catalog import Detail, Pair

PAIRS = "pairs"
RUNS = "runs"
KINDS = {
    "compressors": "How a gradient becomes a payload",
    "collectives": "How ranks sum payloads",
    "strategies": "What ranks exchange, and when",
    "optimizers": "How a gradient changes the weights",
    "models": "What is trained",
    "datasets": "What it is trained on",
    PAIRS: "Which compressors work with which collectives",
    RUNS: "Which runs exist, and which of them can be resumed",
}
EXAMPLES = """[bold]Examples[/bold]

  bench list

  bench list compressors --long

  bench list pairs --json

  bench list runs --out results/runs"""


def _complete_kind(incomplete: str) -> list[tuple[str, str]]:
    return [(kind, meaning) for kind, meaning in KINDS.items() if kind.startswith(incomplete)]


def list_components(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"One of {', '.join(KINDS)}; all components if left out.",
            autocompletion=_complete_kind,
            show_default=False,
        ),
    ] = None,
    long: Annotated[
        bool,
        typer.Option(
            "--long", "-l", help="Show every option with type, default, range and meaning, or why a pair is refused."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs, for `bench list runs`.", show_default="results/runs")
    ] = None,
) -> None:
    """Show all components, their options, which pairs work together, and which runs can be resumed."""
    if kind is not None and kind not in KINDS:
        raise UsageError(f"there is no kind '{kind}'{did_you_mean(kind, KINDS)}; choose one of {', '.join(KINDS)}")
    if kind == RUNS:
        list_runs(out or Path("results/runs"), as_json=as_json)
        return
    if out is not None:
        raise UsageError(f"--out names a folder of runs; write bench list {RUNS} --out {out}")
    if kind == PAIRS:
        _list_pairs(long=long, as_json=as_json)
        return
    kinds = [kind] if kind else list(registry.ROOMS)
    details = _details(kinds) if long else {}
    for each in kinds:
        registry.warn_of_clashes(each)
    if as_json:
        print_json({kind: _as_json(kind, details.get(kind)) for kind in kinds})
        return
    console = stdout_console()
    for each in kinds:
        console.print(f"[bold]{each}[/]  [dim]{KINDS[each]}[/]")
        if long:
            _print_long(console, each, details[each])
        else:
            _print_short(console, each)


def _details(kinds: Sequence[str]) -> dict[str, dict[str, Detail]]:
    from bench.cli.catalog import details

    return {kind: details(kind) for kind in kinds}


def _as_json(kind: str, details: Mapping[str, Detail] | None) -> list[dict[str, Any]]:
    """Return the components of a kind; with details, only those that can be imported."""
    return [
        {"name": name, "description": entry.description} | (dataclasses.asdict(details[name]) if details else {})
        for name, entry in registry.entries(kind).items()
        if details is None or name in details
    ]


def _print_short(console: Console, kind: str) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan")
    for entry in registry.entries(kind).values():
        table.add_row(f"  {entry.name}", escape(entry.description))
    console.print(table)
    console.print()


def _print_long(console: Console, kind: str, details: Mapping[str, Detail]) -> None:
    for name, known in details.items():
        console.print(f"[bold cyan]{name}[/]  {escape(registry.entries(kind)[name].description)}")
        for label, text in known.notes.items():
            console.print(f"  [dim]{label}:[/] {escape(text)}")
        if known.facts:
            facts = ", ".join(f"{name} {_fact_text(value)}" for name, value in known.facts.items())
            console.print(f"  [dim]facts:[/] {escape(facts)}")
        console.print(_options_table(known) if known.options else "  no options")
        console.print()


def _fact_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(_fact_text, value))
    return str(value) or "none"


def _options_table(known: Detail) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for heading in ("  option", "type", "default", "range", "meaning"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "  option")
    for option in known.options:
        cells = (option.type, option.default, option.range, option.meaning)
        table.add_row(f"  {option.name}", *map(escape, cells))
    return table


def _list_pairs(*, long: bool, as_json: bool) -> None:
    from bench.cli.catalog import pairs

    found = pairs()
    if as_json:
        print_json({PAIRS: [dataclasses.asdict(pair) for pair in found]})
        return
    console = stdout_console()
    console.print(_matrix(found))
    refused = [pair for pair in found if pair.refusal]
    if long:
        for pair in refused:
            console.print(f"{pair.compressor} + {pair.collective}: {escape(pair.refusal or '')}")
    elif refused:
        console.print("[dim]with default options; `bench list pairs --long` says why a pair is refused[/dim]")


def _matrix(found: Sequence[Pair]) -> Table:
    collectives = list(dict.fromkeys(pair.collective for pair in found))
    allowed = {(pair.compressor, pair.collective): pair.refusal is None for pair in found}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("compressor", style="cyan", no_wrap=True)
    for collective in collectives:
        table.add_column(collective, justify="center")
    for compressor in dict.fromkeys(pair.compressor for pair in found):
        table.add_row(compressor, *("yes" if allowed[compressor, collective] else "-" for collective in collectives))
    return table
