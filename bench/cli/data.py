"""`bench data`, which shows, downloads and checks data sets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich import box
from rich.markup import escape
from rich.table import Column, Table

from bench.cli.console import print_json, stdout_console
from bench.cli.options import complete, complete_from
from bench.core import registry, spec
from bench.core.config.run import DATA_DIR
from bench.core.errors import RunFailed, UsageError
from bench.core.files import check_writable, writing
from bench.core.waiting import waiting
from collectives.options import did_you_mean

if TYPE_CHECKING:
    from bench.datasets.base import Dataset

ACTIONS = {
    "list": "show the state of every data set",
    "prepare": "download and verify one data set",
    "verify": "load one data set and check it, without a network",
    "sheet": "draw samples of one set of images, and what augmentation makes of them, into --out",
}
EXAMPLES = """[bold]Examples[/bold]

  bench data

  bench data prepare cifar10

  bench data verify cifar10 --data-dir /srv/data

  bench data sheet glyphs:classes=100 --out glyphs.png

  bench data prepare cifar10:url=http://mirror.example/cifar-10-python.tar.gz"""


def data(
    action: Annotated[
        str,
        typer.Argument(
            help="; ".join(f"{action}: {meaning}" for action, meaning in ACTIONS.items()) + ".",
            autocompletion=complete_from(lambda: ACTIONS),
        ),
    ] = "list",
    name: Annotated[
        str | None,
        typer.Argument(
            help="The data set, with options where needed.", autocompletion=complete("datasets"), show_default=False
        ),
    ] = None,
    data_dir: Annotated[Path, typer.Option(help="Folder of the data sets.")] = Path(DATA_DIR),
    out: Annotated[Path | None, typer.Option(help="PNG file of the sheet.", show_default="sheet.png")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Show, download, check or draw data sets."""
    if action not in ACTIONS:
        raise UsageError(
            f"there is no action '{action}'{did_you_mean(action, ACTIONS)}; choose one of {', '.join(ACTIONS)}"
        )
    if action != "list" and name is None:
        raise UsageError(
            f"`bench data {action}` needs the name of a data set; write `bench data {action} NAME`; `bench list "
            "datasets` shows the names"
        )
    if out is not None and action != "sheet":
        raise UsageError(f"`bench data {action}` writes no file; leave out --out {out}")
    if name is None:
        states = list(registry.ask_each("datasets", lambda each: _state(cast("Dataset", each()), data_dir)).values())
    else:
        dataset = cast("Dataset", spec.build("datasets", name))
        _act(action, name, dataset, data_dir, out or Path("sheet.png"))
        states = [_state(dataset, data_dir)]
    if as_json:
        print_json(states)
        return
    numbers = [Column(heading, justify="right") for heading in ("training", "test", "classes")]
    first = Column("data set", style="cyan", no_wrap=True)
    table = Table(first, *numbers, "state", box=box.SIMPLE_HEAD, pad_edge=False)
    for state in states:
        sizes = (str(state[key]) for key in ("train_size", "test_size", "num_classes"))
        colour = "green" if state["present"] else "yellow"
        table.add_row(state["name"], *sizes, f"[{colour}]{escape(state['status'])}[/]")
    stdout_console().print(table)


def _act(action: str, name: str, dataset: Dataset, data_dir: Path, out: Path) -> None:
    from bench.datasets.base import DatasetError  # imports torch

    try:
        if action == "prepare" and not dataset.is_present(data_dir):
            print(f"preparing {dataset.component_name} in {data_dir}", file=sys.stderr)
            dataset.prepare(data_dir)
        if action == "verify":
            waiting.doing(f"loading {name}")
            loaded = map(len, dataset.load(data_dir, seed=1))
            found, expected = ("{} training and {} test samples".format(*sizes) for sizes in (loaded, dataset.sizes()))
            if found != expected:
                raise RunFailed(f"{name} holds {found} instead of {expected}; prepare it again in an empty --data-dir")
            print(f"{name}: {found} can be loaded", file=sys.stderr)
        if action == "sheet":
            _draw(dataset, data_dir, out)
    except DatasetError as error:
        raise RunFailed(str(error)) from None  # the network or the disk failed, not the user


def _draw(dataset: Dataset, data_dir: Path, out: Path) -> None:
    from bench.datasets.sheet import sheet_of

    check_writable(out)
    with writing(out):
        sheet_of(dataset, data_dir).save(out, "PNG")
    print(f"wrote {out}", file=sys.stderr)


def _state(dataset: Dataset, data_dir: Path) -> dict[str, Any]:
    train, test = dataset.sizes()
    return {
        "name": dataset.component_name,
        "train_size": train,
        "test_size": test,
        "num_classes": dataset.num_classes,
        "present": dataset.is_present(data_dir),
        "status": dataset.status(data_dir),
    }
