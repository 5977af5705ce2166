"""Run the sweeps behind the pages, or a quick version of them, and write the rows of each to one CSV file."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.columns import Column, to_cells
from bench.core.rows import read_rows
from bench.core.schema import LAYERS, METRICS
from bench.launch.sweep_file import Settings, SweepFile, read_sweep, toml_table
from bench.report.store import Row, Run, collect_runs, read, read_layers

FILES = Path("examples/published")
PAGES = Path("results/reference/published")
RUNS = Path("results/runs/published")
QUICK_RUNS = Path("results/runs/published-quick")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep of `examples/published/`.

    Attributes:
        name: the name of its file, of the folder of its runs and of its CSV file.
        quick: options with another value in the quick version.
        quick_cells: the values to which the quick version restricts options.
        timed: True: only the steps of its configurations are timed, all of one link in one job; there are no runs.
        adaptive: True: seeds are added until all claims about it are decided.
        every_row: True: the CSV file has every evaluation; False: only the last one of each run.
        layers_of: compressors whose rows per layer are also written.
    """

    name: str
    quick: Settings
    quick_cells: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    timed: bool = False
    adaptive: bool = False
    every_row: bool = False
    layers_of: Sequence[str] = ()

    @property
    def file(self) -> Path:
        """The file for `bench sweep`."""
        return FILES / f"{self.name}.toml"

    @property
    def command(self) -> str:
        """The command that makes the rows."""
        if self.timed or self.adaptive:
            what = "times the steps" if self.timed else "adds seeds to the runs"
            return f"python -m benchmarks.published, which {what} of {self.file}"
        return f"bench sweep {self.file} --out {RUNS / self.name}"

    def csv(self, folder: Path) -> Path:
        return folder / f"{self.name}.csv"

    def layers_csv(self, folder: Path) -> Path:
        return folder / f"{self.name}-layers.csv"


_ENDED = ("ok", "failed", "timeout")  # other runs were stopped, and are repeated

SHORT: Settings = {"epochs": 2, "train_size": 320, "test_size": 100}
SWEEPS: Mapping[str, Sweep] = {
    sweep.name: sweep
    for sweep in (
        Sweep(name="group_topk", quick=SHORT, quick_cells={"world_size": (2, 4)}, every_row=True, adaptive=True),
        Sweep(name="group_topk_links", quick={"steps": 6}, quick_cells={"bandwidth": ("100mbit",)}),
        Sweep(name="group_topk_sharing", quick={"steps": 6}, quick_cells={"world_size": (2, 4)}),
        Sweep(name="algc", quick=SHORT, every_row=True, adaptive=True, layers_of=("algc",)),
        Sweep(name="harder", quick=SHORT, every_row=True, adaptive=True),
        Sweep(name="algc_nodes", quick={}, quick_cells={"cluster_file": (str(FILES / "nodes2.toml"),)}, timed=True),
        Sweep(name="algc_overlap", quick={}, timed=True),
        Sweep(name="answers", quick=SHORT, every_row=True),
        Sweep(
            name="hylo",
            quick=SHORT,
            quick_cells={"model": ("vgg11:width=16,hidden=1024",)},
            every_row=True,
            adaptive=True,
        ),
        Sweep(
            name="hylo_links",
            quick={},
            quick_cells={"bandwidth": ("1gbit",), "collective": ("server:placement=sharded", "allgather", "native")},
            timed=True,
        ),
        Sweep(name="heterogeneous", quick=SHORT, every_row=True),
        Sweep(name="heterogeneous_factors", quick={"steps": 2}, quick_cells={"world_size": (2, 3)}),
        Sweep(name="together", quick=SHORT, quick_cells={"bandwidth": ("100mbit",)}, every_row=True, adaptive=True),
    )
}


def quick_version(sweep: Sweep) -> SweepFile:
    """Return about a tenth of a sweep: its first seed, short runs, and only some of its cells."""
    file = read_sweep(sweep.file)

    def stays(options: Settings) -> bool:
        return all(options.get(name, values[0]) in values for name, values in sweep.quick_cells.items())

    return dataclasses.replace(
        file,
        base=file.base | sweep.quick,
        seeds=file.seeds[:1],
        matrix={
            name: [value for value in values if value in sweep.quick_cells.get(name, values)]
            for name, values in file.matrix.items()
        },
        method=[options for options in file.method if stays(options)],
        include=[options | sweep.quick for options in file.include if stays(options)],
    )


def write_sweep(file: SweepFile, path: Path) -> None:
    """Write a sweep as a file for `bench sweep`."""
    lists = [toml_table("[matrix]", file.matrix)] if file.matrix else []
    tables = [toml_table("[base]", file.base | {"seeds": ",".join(map(str, file.seeds))}), *lists]
    for heading, several in (
        ("[[method]]", file.method),
        ("[[include]]", file.include),
        ("[[exclude]]", file.exclude),
    ):
        tables += [toml_table(heading, options) for options in several]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(tables), encoding="utf-8")


def runs_of(sweep: Sweep, *, quick: bool) -> Path:
    return (QUICK_RUNS if quick else RUNS) / sweep.name


def run_sweep(sweep: Sweep, *, quick: bool, only_look: bool) -> set[str]:
    """Run the missing runs of a sweep; failed runs count as done.

    Args:
        sweep: the sweep.
        quick: use the quick version.
        only_look: run nothing, only return the digests.

    Returns:
        The digests of the sweep's runs; other runs in the folder are from an earlier version of the file.
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
    """Write the sweep's CSV files from its finished runs."""
    collected = ended_runs(runs, digests)
    rows = [row for run in collected for row in (run.rows if sweep.every_row else [run.last_known])]
    write_csv(sweep.csv(folder), rows, METRICS)
    if sweep.layers_of:
        wanted = {run["run_id"] for run in collected if run["compressor"] in sweep.layers_of and run.ended_well}
        layers = [row for row in read_layers([runs]) if row["run_id"] in wanted]
        write_csv(sweep.layers_csv(folder), layers, LAYERS)


def ended_runs(folder: Path, digests: Container[str]) -> list[Run]:
    """Return the finished runs in a folder, successful or not, with one of these digests."""
    return [run for run in collect_runs(read([folder])) if run["digest"] in digests and run["status"] in _ENDED]


def read_layers_csv(path: Path) -> list[Row]:
    return read_rows(path, LAYERS) if path.is_file() else []


def write_csv(path: Path, rows: Sequence[Row], columns: tuple[Column, ...]) -> None:
    """Write the rows without the columns that are empty in all of them; without rows remove the file."""
    if not rows:
        path.unlink(missing_ok=True)
        return
    filled = [column.name for column in columns if any(row[column.name] is not None for row in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, filled, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(to_cells(row, columns) for row in rows)
