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

from bench.cli.output.console import print_json, stdout_console
from bench.core import registry
from bench.core.errors import UsageError
from collectives.options import did_you_mean, incompatibility

if TYPE_CHECKING:
    pass


import inspect
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from collectives.options import Options, options_of

if TYPE_CHECKING:
    from bench.datasets.base import Dataset
    from bench.models.base import Model
    from compressors.base import Compressor


from bench.cli.output.console import plain_table
from bench.core.errors import NothingToCompare
from bench.core.files import locked
from bench.core.run_folder import RunFolder, read_json

# Labels of the docstring paragraphs that are shown with a component's options.
_NOTES = ("Source", "Differs", "Bytes")
_NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detail:
    """Details of a component, read from its class.

    Attributes:
        notes: labelled paragraphs of its docstring: its source, how it differs from that, and the bytes it sends.
        facts: properties by name: flags, numbers, texts, or lists of these.
        options: in declaration order.
    """

    notes: dict[str, str]
    facts: dict[str, Any]
    options: list[dict[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """One cell of the compressor x collective matrix, for default options of both.

    Attributes:
        refusal: the reason why the two cannot work together; None if they can.
    """

    compressor: str
    collective: str
    refusal: str | None


def details(kind: str) -> dict[str, Detail]:
    """Import every component of a kind and return its details, by name."""

    def detail(component: type[Options]) -> Detail:
        facts = _FACTS_OF_DEFAULT[kind](component()) if kind in _FACTS_OF_DEFAULT else {}
        return Detail(
            notes=_notes(component),
            facts=_class_facts(component, registry.KINDS[kind].base) | facts,
            options=[option.describe() for option in options_of(component)],
        )

    return registry.ask_each(kind, detail)


def pairs() -> list[Pair]:
    """Return all pairs of compressor and collective, with the reason if a pair is refused."""
    collectives = registry.ask_each("collectives", lambda component: component())

    def refusals(component: type[Options]) -> dict[str, str | None]:
        compressor = cast("Compressor", component())
        return {name: incompatibility(compressor.check_compatible, each) for name, each in collectives.items()}

    return [
        Pair(compressor=compressor, collective=collective, refusal=refusal)
        for compressor, answers in registry.ask_each("compressors", refusals).items()
        for collective, refusal in answers.items()
    ]


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


def list_runs(out: Path, *, as_json: bool) -> None:
    """Print one row per run, oldest first; as JSON one entry per run.

    Raises:
        NothingToCompare: the folder holds no run.
    """
    folders = [RunFolder(config.parent) for config in sorted(out.glob("*/config.json"))]
    if not folders:
        raise NothingToCompare(f"there is no run in {out}; `bench run` makes one, and --out names another folder")
    runs = [_state(folder) for folder in folders]
    if as_json:
        print_json({"runs": runs})
        return
    table = plain_table()
    for heading in ("run", "status", "step", "resumes from"):
        table.add_column(heading, justify="left" if heading in ("run", "status") else "right", overflow="fold")
    for run in runs:
        shown = ("run", "status", "step", "resumable")
        table.add_row(*("" if run[name] is None else escape(str(run[name])) for name in shown))
    stdout_console().print(table)
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


PAIRS = "pairs"
RUNS = "runs"
SHOWN = {
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
    if kind == RUNS:
        list_runs(out or Path("results/runs"), as_json=as_json)
        return
    if out is not None:
        raise UsageError(f"--out names a folder of runs; write bench list {RUNS} --out {out}")
    if kind == PAIRS:
        _list_pairs(long=long, as_json=as_json)
        return
    kinds = [kind] if kind else list(registry.KINDS)
    details = _details(kinds) if long else {}
    for each in kinds:
        registry.warn_of_clashes(each)
    if as_json:
        print_json({kind: _as_json(kind, details.get(kind)) for kind in kinds})
        return
    console = stdout_console()
    for each in kinds:
        console.print(f"[bold]{each}[/]  [dim]{SHOWN[each]}[/]")
        if long:
            _print_long(console, each, details[each])
        else:
            _print_short(console, each)


def _details(kinds: Sequence[str]) -> dict[str, dict[str, Detail]]:
    from bench.cli.list import details

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
        name, *cells = option.values()
        table.add_row(f"  {name}", *map(escape, cells))
    return table


def _list_pairs(*, long: bool, as_json: bool) -> None:
    from bench.cli.list import pairs

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
