"""`bench list`, which shows components and their options, which compressors work with which collectives, and runs."""

import dataclasses
import inspect
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from bench.cli.console import print_json, stdout_console, table_of
from bench.cli.options import complete_from
from bench.core import registry
from bench.core.errors import NothingToCompare, UsageError
from bench.core.files import locked
from bench.core.run_folder import RUNS_FOLDER, RunFolder, read_json
from bench.launch.recipes import names, recipe
from bench.launch.run import last_step
from bench.launch.sweep_file import run_arguments
from bench.report import artifacts
from collectives.options import Options, did_you_mean, incompatibility, options_of

if TYPE_CHECKING:
    from compressors.base import Compressor

PAIRS = "pairs"
RECIPES = "recipes"
RUNS = "runs"
SHOWN = {kind.name: kind.meaning for kind in registry.KINDS.values()} | {
    PAIRS: "Which compressors work with which collectives",
    RECIPES: "Published options to start from, for --recipe",
    RUNS: "Runs, decisions and profiles of a folder, newest first, with the commands that made them",
}
EXAMPLES = """[bold]Examples[/bold]

  bench list

  bench list compressors --long

  bench list pairs --json

  bench list recipes

  bench list runs results/runs"""


def list_components(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"One of {', '.join(SHOWN)}; all components if left out.",
            autocompletion=complete_from(lambda: SHOWN),
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder of runs, for `bench list runs`.", show_default="results/runs", metavar="[FOLDER]"),
    ] = None,
    long: Annotated[
        bool,
        typer.Option(
            "--long",
            "-l",
            help="Show every option with type, default, range and meaning, why a compressor does not work with a "
            "collective, or what a recipe stands for.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Show components, their options, which compressors work with which collectives, and what was run."""
    if kind is not None and kind not in SHOWN:
        raise UsageError(f"there is no kind '{kind}'{did_you_mean(kind, SHOWN)}; choose one of {', '.join(SHOWN)}")
    if folder is not None and kind != RUNS:
        raise UsageError(f"only `bench list {RUNS}` takes a folder; write bench list {RUNS} {folder}")
    if kind == RUNS:
        _list_runs(folder or RUNS_FOLDER, as_json=as_json)
    elif kind == PAIRS:
        _list_pairs(long=long, as_json=as_json)
    elif kind == RECIPES:
        _list_recipes(long=long, as_json=as_json)
    else:
        _list_components([kind] if kind else list(registry.KINDS), long=long, as_json=as_json)


# Components.

# Labels of the docstring paragraphs that are shown with a component's options: its source, how it differs from the
# source, and the bytes that it sends.
_NOTES = ("Source", "Differs", "Bytes")
_END = r"(?=\n *\n|\n *[A-Z][a-z]+:|\Z)"
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
            table = Table.grid(Column(no_wrap=True, style="cyan"), padding=(0, 2))
            for component in components:
                table.add_row(f"  {component['name']}", escape(component["description"]))
            console.print(table, "")


def _components(kind: str, *, long: bool) -> list[dict[str, Any]]:
    """Return the name and the description of every component of a kind.

    With ``long``, only components that can be imported are returned, and each entry also has labelled paragraphs of the
    component's docstring (``notes``), its class attributes (``facts``) and its options.
    """
    described = {
        name: {"name": name, "description": entry.description} for name, entry in registry.entries(kind).items()
    }
    if not long:
        return list(described.values())

    def details(component: type[Options]) -> dict[str, Any]:
        *_, base = (parent for parent in component.__mro__ if parent.__name__ == registry.KINDS[kind].base)
        # A component is described in its own module and class, and in those of the classes whose options it inherits.
        sources = [component, *(parent for parent in component.__mro__ if not issubclass(parent, base))]
        docs = [doc for cls in sources for doc in (inspect.getdoc(sys.modules[cls.__module__]), cls.__doc__)]
        text = "\n\n".join(filter(None, docs))
        labelled = {label: re.search(rf"^ *{label}: (.*?){_END}", text, re.DOTALL | re.MULTILINE) for label in _NOTES}
        facts = {
            name: _plain(getattr(component, name))
            for name, hint in inspect.get_annotations(base).items()
            if str(hint).startswith("ClassVar") and hasattr(component, name)
        }
        return {
            "notes": {label.lower(): " ".join(found[1].split()) for label, found in labelled.items() if found},
            "facts": facts | _facts_of_default(component, kind),
            "options": [option.describe() for option in options_of(component)],
        }

    return [described[name] | known for name, known in registry.ask_each(kind, details).items()]


def _print_details(console: Console, component: dict[str, Any]) -> None:
    console.print(f"[bold cyan]{component['name']}[/]  {escape(component['description'])}")
    for label, text in component["notes"].items():
        console.print(f"  [dim]{label}:[/] {escape(text)}")
    if facts := [f"{name} {_fact_text(value)}" for name, value in component["facts"].items()]:
        console.print(f"  [dim]facts:[/] {escape(', '.join(facts))}")
    if not component["options"]:
        console.print("  no options\n")
        return
    columns = [
        Column(heading, overflow="fold", no_wrap=heading == "  option")
        for heading in ("  option", "type", "default", "range", "meaning")
    ]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for option in component["options"]:
        table.add_row("  " + option["name"], *map(escape, list(option.values())[1:]))
    console.print(table, "")


def _fact_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(_fact_text, value))
    return str(value) or "none"


def _plain(value: Any) -> Any:
    # Convert a value for JSON: classes and this project's objects to names of classes, sets to sorted lists.
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, type):
        return value.__name__
    return value if isinstance(value, (str, int, float, list, type(None))) else type(value).__name__


def _facts_of_default(component: Any, kind: str) -> dict[str, Any]:  # facts about a component with default options
    match kind:
        case "compressors":
            return {"emits": _plain(component().traits.emits)}
        case "datasets":
            dataset = component()
            sizes = dict(zip(("train_size", "test_size"), dataset.sizes(), strict=True))
            shape = tuple(dataset.dummy_batch(1, "meta").shape[1:])
            return {"num_classes": dataset.num_classes, "input_shape": shape, **sizes}
        case "models":
            import torch

            with torch.device("meta"):  # makes only shapes: takes no memory, initialises nothing
                model = component().build(_NUM_CLASSES)
            return {"num_parameters": sum(parameter.numel() for parameter in model.parameters())}
    return {}


# Pairs.


def _list_pairs(*, long: bool, as_json: bool) -> None:
    collectives = registry.ask_each("collectives", lambda component: component())

    def refusals(component: type[Options]) -> dict[str, str | None]:
        check = cast("Compressor", component()).check_compatible
        return {name: incompatibility(check, each) for name, each in collectives.items()}

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
    columns = [Column(collective, justify="center") for collective in collectives]
    table = Table(Column("compressor", style="cyan", no_wrap=True), *columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for compressor, reasons in answers.items():
        table.add_row(compressor, *("-" if reason else "yes" for reason in reasons.values()))
    console.print(table)
    refused = [pair for pair in pairs if pair["refusal"]]
    for pair in refused if long else ():
        console.print(f"{pair['compressor']} + {pair['collective']}: {escape(pair['refusal'] or '')}")
    if refused and not long:
        console.print(
            "[dim]with default options; `bench list pairs --long` says why a compressor does not work with a "
            "collective[/dim]"
        )


# Recipes.


def _list_recipes(*, long: bool, as_json: bool) -> None:
    found = [recipe(name) for name in names()]
    if as_json:
        print_json({RECIPES: [dataclasses.asdict(each) for each in found]})
        return
    for each in found:
        stdout_console().print(f"[cyan]{each.name}[/]  {escape(each.title)}\n  {each.result}")
        if long:
            print(f"  source: {each.source}\n  {each.samples_per_step} samples per step, all ranks together")
            print(f"  {shlex.join(run_arguments(each.options))}")


# Runs, and what other commands wrote.


def _list_runs(out: Path, *, as_json: bool) -> None:  # newest first
    found = [(config.parent, _state(RunFolder(config.parent))) for config in out.glob("*/config.json")]
    for kind, each in artifacts.artifacts_in(out):
        state = {"run": each.path.name, "kind": kind.name, "status": each.status, "step": None, "resumable": None}
        found.append((each.path, state | {"command": each.command}))
    if not found:
        raise NothingToCompare(f"there is no run in {out}; `bench run` makes one, and you can name another folder")
    runs = [state for _, state in sorted(found, key=lambda each: each[0].stat().st_mtime, reverse=True)]
    if as_json:
        print_json({"runs": runs})
        return
    rows = []
    for run in runs:
        name, *others, command = ("" if value is None else str(value) for value in run.values())
        rows.append(["\n  ".join(filter(None, [name, command])), *others])
    console = stdout_console()
    console.print(table_of(("run, and the command that made it", "kind", "status"), ("step", "resumes from"), rows))
    where = escape(str(out if len(found) == 1 and found[0][0] == out else out / "RUN"))
    console.print(f"[dim]bench run --again {where} repeats a run, decision or profile[/dim]")
    if any(run["resumable"] is not None for run in runs):
        console.print(f"[dim]bench run --resume {where} resumes a run[/dim]")


def _state(folder: RunFolder) -> dict[str, Any]:
    # The status is `running` while a run runs, and `killed` if the run ended without writing a status.
    from bench.report.page import environments  # takes 20 ms, so only if it is needed

    _, commands, _ = environments([folder.environment])
    with locked(folder.path) as is_left:
        summary = (read_json(folder.status) or {}) if is_left else {"status": "running"}
        return {
            "run": folder.run_id,
            "kind": "run",
            "status": summary.get("status", "killed"),
            "step": summary.get("step"),
            "resumable": last_step(folder) if is_left else None,
            "command": next(iter(commands), ""),
        }
