"""The sweeps behind the pages: their files, what of them is quick, and their rows as one CSV file each."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.rows import read_rows
from bench.core.schema.cells import to_cells
from bench.core.schema.column import Column
from bench.core.schema.layers import LAYERS
from bench.core.schema.metrics import METRICS
from bench.launch.sweeps.file import Options, SweepFile, read_sweep
from bench.launch.sweeps.written import toml_table
from bench.report.runs import Run, collect_runs
from bench.report.store import Row, read, read_layers

FILES = Path("examples/published")
PAGES = Path("results/reference/published")
RUNS = Path("results/runs/published")
QUICK_RUNS = Path("results/runs/published-quick")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep of `examples/published/`.

    Attributes:
        name: of its file, of its runs' folder and of its CSV file.
        quick: what takes another value in the quick version.
        quick_cells: of these options only these values are tried there.
        every_row: the CSV file holds every evaluation; else the last one of each run.
        layers_of: compressors whose rows per layer are kept as well.
    """

    name: str
    quick: Options
    quick_cells: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    every_row: bool = False
    layers_of: Sequence[str] = ()

    @property
    def file(self) -> Path:
        """What `bench sweep` is given."""
        return FILES / f"{self.name}.toml"

    @property
    def command(self) -> str:
        """What makes the runs."""
        return f"bench sweep {self.file} --out {RUNS / self.name}"

    def csv(self, folder: Path) -> Path:
        """Its rows, in a folder of pages."""
        return folder / f"{self.name}.csv"

    def layers_csv(self, folder: Path) -> Path:
        """Its rows per layer."""
        return folder / f"{self.name}-layers.csv"


_ENDED = ("ok", "failed", "timeout")  # others were stopped, and are done again

SHORT: Options = {"epochs": 2, "train_size": 320, "test_size": 100}
SWEEPS: Mapping[str, Sweep] = {
    sweep.name: sweep
    for sweep in (
        Sweep(name="group_topk", quick=SHORT, quick_cells={"world_size": (2, 4)}, every_row=True),
        Sweep(name="group_topk_links", quick={"steps": 6}, quick_cells={"bandwidth": ("100mbit",)}),
        Sweep(name="group_topk_sharing", quick={"steps": 6}, quick_cells={"world_size": (2, 4)}),
        Sweep(name="algc", quick=SHORT, every_row=True, layers_of=("algc",)),
        Sweep(name="harder", quick=SHORT, every_row=True),
        Sweep(name="algc_nodes", quick={"steps": 5}, quick_cells={"cluster_file": (str(FILES / "nodes2.toml"),)}),
        Sweep(name="algc_overlap", quick={"steps": 6}),
        Sweep(name="answers", quick=SHORT, every_row=True),
        Sweep(name="hylo", quick=SHORT, quick_cells={"model": ("vgg11:width=16,hidden=1024",)}, every_row=True),
        Sweep(
            name="hylo_links",
            quick={"steps": 5},
            quick_cells={"bandwidth": ("1gbit",), "collective": ("server:placement=sharded", "allgather", "native")},
        ),
        Sweep(name="heterogeneous", quick=SHORT, every_row=True),
        Sweep(name="heterogeneous_factors", quick={"steps": 2}, quick_cells={"world_size": (2, 3)}),
        Sweep(name="together", quick=SHORT, quick_cells={"bandwidth": ("100mbit",)}, every_row=True),
    )
}


def quick_version(sweep: Sweep) -> SweepFile:
    """A tenth of a sweep: its first seed, short, and only some of its cells."""
    asked = read_sweep(sweep.file)

    def stays(options: Options) -> bool:
        return all(options.get(name, values[0]) in values for name, values in sweep.quick_cells.items())

    return dataclasses.replace(
        asked,
        base=asked.base | sweep.quick,
        seeds=asked.seeds[:1],
        matrix={
            name: [value for value in values if value in sweep.quick_cells.get(name, values)]
            for name, values in asked.matrix.items()
        },
        method=[options for options in asked.method if stays(options)],
        include=[options | sweep.quick for options in asked.include if stays(options)],
    )


def write_sweep(asked: SweepFile, path: Path) -> None:
    """A sweep as the file that `bench sweep` reads."""
    lists = [toml_table("[matrix]", asked.matrix)] if asked.matrix else []
    tables = [toml_table("[base]", asked.base | {"seeds": ",".join(map(str, asked.seeds))}), *lists]
    for heading, several in (
        ("[[method]]", asked.method),
        ("[[include]]", asked.include),
        ("[[exclude]]", asked.exclude),
    ):
        tables += [toml_table(heading, options) for options in several]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(tables), encoding="utf-8")


def runs_of(sweep: Sweep, *, quick: bool) -> Path:
    """The folder of its runs."""
    return (QUICK_RUNS if quick else RUNS) / sweep.name


def run_sweep(sweep: Sweep, *, quick: bool, only_look: bool) -> set[str]:
    """Do what is missing of a sweep; a run that failed is a row like any other.

    Args:
        sweep: which.
        quick: the quick version.
        only_look: do nothing.

    Returns:
        The digests of its runs: others that lie in the folder are of a file that said something else.
    """
    file = sweep.file
    if quick:
        file = QUICK_RUNS / f"{sweep.name}.toml"
        write_sweep(quick_version(sweep), file)
    command = [sys.executable, "-m", "bench", "sweep", str(file), "--out", str(runs_of(sweep, quick=quick)), "--json"]
    done = subprocess.run([*command, *["--dry-run"] * only_look], stdout=subprocess.PIPE, check=False)
    if done.returncode not in (0, 3):  # 3: some of its runs failed
        raise SystemExit(done.returncode)
    return {run["digest"] for run in json.loads(done.stdout)}


def keep_rows(sweep: Sweep, runs: Path, digests: Container[str], folder: Path) -> None:
    """Write the sweep's CSV files from those of its runs that have ended."""
    collected = ended_runs(runs, digests)
    rows = [row for run in collected for row in (run.rows if sweep.every_row else [run.last_known])]
    write_csv(sweep.csv(folder), rows, METRICS)
    if sweep.layers_of:
        wanted = {run["run_id"] for run in collected if run["compressor"] in sweep.layers_of and run.ended_well}
        layers = [row for row in read_layers([runs]) if row["run_id"] in wanted]
        write_csv(sweep.layers_csv(folder), layers, LAYERS)


def ended_runs(folder: Path, digests: Container[str]) -> list[Run]:
    """Of the runs in a folder those that have ended, well or not, and are of these configurations."""
    return [run for run in collect_runs(read([folder])) if run["digest"] in digests and run["status"] in _ENDED]


def read_layers_csv(path: Path) -> list[Row]:
    """What `keep_rows` wrote of layers; nothing where there is no such file."""
    return read_rows(path, LAYERS) if path.is_file() else []


def write_csv(path: Path, rows: Sequence[Row], columns: tuple[Column, ...]) -> None:
    """The rows, without columns that are empty in all of them; no file where there are none."""
    if not rows:
        path.unlink(missing_ok=True)
        return
    filled = [column.name for column in columns if any(row[column.name] is not None for row in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, filled, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(to_cells(row, columns) for row in rows)
