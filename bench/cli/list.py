"""`bench list`, which shows components, their options, which pairs work together, and runs."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.cli.output.console import print_json, stdout_console, table_of
from bench.core import registry
from bench.core.errors import NothingToCompare, UsageError
from bench.core.files import locked
from bench.core.run_folder import RunFolder, read_json
from collectives.options import Options, did_you_mean, incompatibility, options_of

if TYPE_CHECKING:
    from bench.datasets.base import Dataset
    from bench.models.base import Model
    from compressors.base import Compressor

PAIRS = "pairs"
RUNS = "runs"
SHOWN = {kind.name: kind.meaning for kind in registry.KINDS.values()} | {
    PAIRS: "Which compressors work with which collectives",
    RUNS: "Which runs exist, and which of them can be resumed",
}
EXAMPLES = """[bold]Examples[/bold]

  bench list

  bench list compressors --long

  bench list pairs --json

  bench list runs --out results/runs"""


def _complete_kind(incomplete: str) -> list[tuple[str, str]]:
    return [(kind, meaning) for kind, meaning in SHOWN.items() if kind.startswith(incomplete)]


def list_components(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"One of {', '.join(SHOWN)}; all components if left out.",
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
    if kind is not None and kind not in SHOWN:
        raise UsageError(f"there is no kind '{kind}'{did_you_mean(kind, SHOWN)}; choose one of {', '.join(SHOWN)}")
    if out is not None and kind != RUNS:
        raise UsageError(f"--out names a folder of runs; write bench list {RUNS} --out {out}")
    if kind == RUNS:
        _list_runs(out or Path("results/runs"), as_json=as_json)
    elif kind == PAIRS:
        _list_pairs(long=long, as_json=as_json)
    else:
        _list_components([kind] if kind else list(registry.KINDS), long=long, as_json=as_json)


# Components.

# Labels of the docstring paragraphs that are shown with a component's options: its source, how it differs from that,
# and the bytes it sends.
_NOTES = ("Source", "Differs", "Bytes")
_NUM_CLASSES = 10


def _list_components(kinds: Sequence[str], *, long: bool, as_json: bool) -> None:
    for each in kinds:
        registry.warn_of_clashes(each)
    listed = {kind: _components(kind, long=long) for kind in kinds}
    if as_json:
        print_json(listed)
        return
    console = stdout_console()
    for each, components in listed.items():
        console.print(f"[bold]{each}[/]  [dim]{SHOWN[each]}[/]")
        if long:
            for component in components:
                _print_details(console, component)
        else:
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True, style="cyan")
            for component in components:
                table.add_row(f"  {component['name']}", escape(component["description"]))
            console.print(table)
            console.print()


def _components(kind: str, *, long: bool) -> list[dict[str, Any]]:
    """Return name and description of every component of a kind; `long`: and details, of those that can be imported."""
    described = {
        name: {"name": name, "description": entry.description} for name, entry in registry.entries(kind).items()
    }
    if not long:
        return list(described.values())
    details = registry.ask_each(kind, lambda component: _details(component, kind))
    return [described[name] | known for name, known in details.items()]


def _details(component: type[Options], kind: str) -> dict[str, Any]:
    """Return labelled paragraphs of a component's docstring, facts about it by name, and its options."""
    facts = _class_facts(component, registry.KINDS[kind].base)
    if kind in _FACTS_OF_DEFAULT:
        facts |= _FACTS_OF_DEFAULT[kind](component())
    options = [option.describe() for option in options_of(component)]
    return {"notes": _notes(component), "facts": facts, "options": options}


def _print_details(console: Console, component: dict[str, Any]) -> None:
    console.print(f"[bold cyan]{component['name']}[/]  {escape(component['description'])}")
    for label, text in component["notes"].items():
        console.print(f"  [dim]{label}:[/] {escape(text)}")
    if component["facts"]:
        facts = ", ".join(f"{name} {_fact_text(value)}" for name, value in component["facts"].items())
        console.print(f"  [dim]facts:[/] {escape(facts)}")
    if not component["options"]:
        console.print("  no options\n")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for heading in ("  option", "type", "default", "range", "meaning"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "  option")
    for option in component["options"]:
        name, *cells = option.values()
        table.add_row(f"  {name}", *map(escape, cells))
    console.print(table)
    console.print()


def _fact_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(_fact_text, value))
    return str(value) or "none"


def _notes(component: type[Options]) -> dict[str, str]:
    text = "\n\n".join(filter(None, (inspect.getdoc(sys.modules[component.__module__]), component.__doc__)))
    found = {}
    for label in _NOTES:
        match = re.search(rf"^ *{label}: (.*?)(?=\n *\n|\n *[A-Z][a-z]+:|\Z)", text, re.DOTALL | re.MULTILINE)
        if match:
            found[label.lower()] = " ".join(match[1].split())
    return found


def _class_facts(component: type[Options], base: str) -> dict[str, Any]:
    """Return the class variables that the kind's base class declares, with the component's values."""
    declared: dict[str, Any] = {}
    for parent in component.__mro__:
        if parent.__name__ == base:
            declared = inspect.get_annotations(parent)
    return {
        name: _plain(getattr(component, name))
        for name, hint in declared.items()
        if str(hint).startswith("ClassVar") and hasattr(component, name)
    }


def _plain(value: Any) -> Any:
    """Return a fact in a form that JSON can hold: classes as their names, sets as sorted lists."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (tuple, frozenset)):
        return sorted(map(_plain, value)) if isinstance(value, frozenset) else [_plain(item) for item in value]
    return value


def _compressor_facts(component: Options) -> dict[str, Any]:
    return {"emits": _plain(cast("Compressor", component).emits)}


def _dataset_facts(component: Options) -> dict[str, Any]:
    dataset = cast("Dataset", component)
    train, test = dataset.sizes()
    return {
        "num_classes": dataset.num_classes,
        "image_size": dataset.image_size,
        "train_size": train,
        "test_size": test,
    }


def _model_facts(component: Options) -> dict[str, Any]:
    import torch

    with torch.device("meta"):  # shapes only: no memory, no initialisation
        model = cast("Model", component).build(_NUM_CLASSES)
    return {"num_parameters": sum(parameter.numel() for parameter in model.parameters())}


# Facts that need an instance, which is made with default options.
_FACTS_OF_DEFAULT: dict[str, Callable[[Options], dict[str, Any]]] = {
    "compressors": _compressor_facts,
    "datasets": _dataset_facts,
    "models": _model_facts,
}


# Pairs.


def _list_pairs(*, long: bool, as_json: bool) -> None:
    collectives = registry.ask_each("collectives", lambda component: component())

    def refusals(component: type[Options]) -> dict[str, str | None]:
        compressor = cast("Compressor", component())
        return {name: incompatibility(compressor.check_compatible, each) for name, each in collectives.items()}

    answers = registry.ask_each("compressors", refusals)
    pairs = [
        {"compressor": compressor, "collective": collective, "refusal": refusal}
        for compressor, reasons in answers.items()
        for collective, refusal in reasons.items()
    ]
    if as_json:
        print_json({PAIRS: pairs})
        return
    console = stdout_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("compressor", style="cyan", no_wrap=True)
    for collective in collectives:
        table.add_column(collective, justify="center")
    for compressor, reasons in answers.items():
        table.add_row(compressor, *("-" if reason else "yes" for reason in reasons.values()))
    console.print(table)
    refused = [pair for pair in pairs if pair["refusal"]]
    if long:
        for pair in refused:
            console.print(f"{pair['compressor']} + {pair['collective']}: {escape(pair['refusal'] or '')}")
    elif refused:
        console.print("[dim]with default options; `bench list pairs --long` says why a pair is refused[/dim]")


# Runs.


def _list_runs(out: Path, *, as_json: bool) -> None:
    """Print one row per run, oldest first; as JSON one entry per run."""
    folders = [RunFolder(config.parent) for config in sorted(out.glob("*/config.json"))]
    if not folders:
        raise NothingToCompare(f"there is no run in {out}; `bench run` makes one, and --out names another folder")
    runs = [_state(folder) for folder in folders]
    if as_json:
        print_json({"runs": runs})
        return
    rows = [["" if value is None else str(value) for value in run.values()] for run in runs]
    stdout_console().print(table_of(("run", "status"), ("step", "resumes from"), rows))
    if any(run["resumable"] is not None for run in runs):
        stdout_console().print(f"[dim]bench run --resume {escape(str(out))}/RUN resumes one of them[/dim]")


def _state(folder: RunFolder) -> dict[str, Any]:
    """Return a run's state; its status is `running` while it runs, and `killed` if it ended without writing one."""
    from bench.launch.run import last_step

    with locked(folder.path) as is_left:
        summary = (read_json(folder.status) or {}) if is_left else {"status": "running"}
        return {
            "run": folder.run_id,
            "status": summary.get("status", "killed"),
            "step": summary.get("step"),
            "resumable": last_step(folder) if is_left else None,
        }
