"""Measure one exchange of ResNet-18's gradient on virtual hosts: its time, and the CPU milliseconds of its parts.

An exchange is everything between the gradients and the update, in the buckets that a run uses. The gradients are given,
so that the backward pass takes no time. The methods are interleaved on the same hosts. Figures are medians over all
rounds of the slowest rank's seconds and of the ranks' mean CPU seconds.

    python benchmarks/exchange.py                                 # four hosts at 100 Mbit/s; two at 1 Gbit/s
    python benchmarks/exchange.py --against CHECKOUT              # compared with another checkout of this project
    python benchmarks/exchange.py --step [--against CHECKOUT]     # a training step, and one without an exchange
    python benchmarks/exchange.py --powersgd                      # PowerSGD, and the formula of its authors' package
    python benchmarks/exchange.py --break-even [--against CHECKOUT]  # two hosts, a core each: where bf16 is faster

`link_ms` is the time that the busiest host's frames occupy the link, `of_link` its share of the exchange, and `ratio`
the median over rounds of the time relative to the first method's. `of_before` is the geometric mean over rounds of the
time relative to that of the other checkout, with its 95 % interval. The rows replace those of the same mode in `--csv`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compressors.base import DdpHook

HERE = Path(__file__).resolve()
ROOT, WORKER = HERE.parents[1], HERE.parent / "exchange_worker.py"
RESULTS = ROOT / "results" / "reference" / "exchange.csv"
GROUP_TOPK, BF16 = "group_topk+allgather", "bf16 by gloo"
BREAK_EVEN_RATES = (100e6, 300e6, 1e9, 3e9, 10e9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """A cluster and the methods that are measured on it.

    Attributes:
        mode: identifies the rows in the file.
        hosts: number of hosts.
        rate_bps: rate of each host's link in bit/s.
        groups: groups of methods. The methods of a group are interleaved; groups follow each other, so that not all
            methods need memory at once.
        images: images per host in the measured training step; 0: no training step, only an exchange of given
            gradients.
        own_core: run host i only on core i.
    """

    mode: str
    hosts: int
    rate_bps: float
    groups: tuple[tuple[str, ...], ...]
    images: int = 0
    own_core: bool = False


def scenes(options: argparse.Namespace) -> list[Scene]:
    if options.step:
        ways = tuple(options.ways or ("nothing", GROUP_TOPK))
        return [Scene(mode="step", hosts=4, rate_bps=100e6, groups=(ways,), images=options.images or 4)]
    if options.powersgd:
        ours = ("powersgd+native", "powersgd:alternate=true+native", "powersgd of its authors")
        return [Scene(mode="powersgd", hosts=2, rate_bps=1e9, groups=(ours,))]
    if options.break_even:
        groups = tuple((BF16, way) for way in options.ways or all_pairs())
        return [
            Scene(mode="break-even", hosts=2, rate_bps=rate, groups=groups, own_core=True) for rate in BREAK_EVEN_RATES
        ]
    ways = tuple(options.ways or (GROUP_TOPK, "usual", BF16))
    links = ((4, 100e6), (2, 1e9))
    return [
        Scene(mode="exchange", hosts=hosts, rate_bps=rate, groups=(ways,))
        for hosts, rate in links
        if options.hosts in (None, hosts)
    ]


def all_pairs() -> list[str]:
    """Return every compressor with its default collective."""
    from bench.core import registry, spec
    from collectives.options import incompatibility

    pairs = []
    for name in registry.entries("compressors"):
        compressor = spec.build("compressors", name)
        if isinstance(compressor, DdpHook) or name == "none":
            continue
        fitting = [
            collective
            for collective in compressor.traits.default_collectives
            if incompatibility(compressor.check_compatible, spec.build("collectives", collective)) is None
        ]
        pairs.append(f"{name}+{fitting[0]}")
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--step", action="store_true", help="a training step, and one without an exchange")
    mode.add_argument("--powersgd", action="store_true", help="PowerSGD, and the formula of its authors' package")
    mode.add_argument("--break-even", action="store_true", help="the link rate above which dense bf16 is faster")
    parser.add_argument("--against", type=Path, help="another checkout of this project, such as the previous commit")
    parser.add_argument("--ways", nargs="+", help="only these: COMPRESSOR+COLLECTIVE, usual, nothing, 'bf16 by gloo'")
    parser.add_argument("--hosts", type=int, choices=(2, 4), help="only the cluster with this number of hosts")
    parser.add_argument("--images", type=int, help="with --step, images per host; more make computing longer (4)")
    parser.add_argument("--turns", type=int, default=15, help="number of rounds")
    parser.add_argument("--per-turn", type=int, default=2, help="exchanges of each method in a round")
    parser.add_argument("--csv", type=Path, help=f"write the rows to this file, such as {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.powersgd and options.ways:
        parser.error("--powersgd has its own methods; leave out --ways")
    if options.images is not None and not options.step:
        parser.error("only a training step has images; add --step or leave out --images")
    if options.images is not None and options.images < 1:
        parser.error("--images is below 1; a training step needs one or more")
    if options.hosts and (options.step or options.powersgd or options.break_even):
        parser.error("only an exchange alone is measured on two clusters; leave out --hosts")
    checkouts = {"now": ROOT} | ({"before": options.against.resolve()} if options.against else {})
    rows: list[dict[str, Any]] = []
    for scene in scenes(options):
        rows += run_scene(scene, checkouts, options)
        if options.csv:
            write_rows(options.csv, rows)
    from bench.core.environment import origin_columns

    print("machine:", ", ".join(f"{name} {value}" for name, value in origin_columns().items()))
    print_table(rows)
    if options.break_even:
        print_break_even(rows)
    return 0


def run_scene(scene: Scene, checkouts: dict[str, Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the hosts, each with one process per checkout, and read their measurements."""
    from bench.hosts.cluster import Cluster, HostLink
    from bench.hosts.virtual_network import VirtualNetwork
    from bench.report.statistics import estimate

    link = HostLink(name="host", uplink_bps=scene.rate_bps, downlink_bps=scene.rate_bps)
    cluster = Cluster.uniform(scene.hosts, link=link)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = dataclasses.asdict(scene) | {
            "checkouts": {name: str(path) for name, path in checkouts.items()},
            "turns": options.turns,
            "per_turn": options.per_turn,
            "address": cluster.address(0),
        }
        (folder / "plan.json").write_text(json.dumps(plan))

        with VirtualNetwork(cluster) as network:
            commands = [[sys.executable, str(WORKER), name, "all", str(host)] for host in range(scene.hosts)]
            hosts = [network.start(host, command, {"OMP_NUM_THREADS": "1"}) for host, command in enumerate(commands)]
            while any(host.poll() is None for host in hosts) and not any(host.returncode for host in hosts):
                time.sleep(0.1)
            failed = [host.returncode for host in hosts if host.returncode]
            for host in hosts:
                host.kill()
        if failed:
            raise SystemExit(f"a host failed with exit code {failed[0]}")
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    seconds = {(row["way"], row["checkout"]): row["seconds"] for row in rows}
    first: list[float] = []
    for row in rows:  # in the order of the groups; ratios are relative to the first method of the group
        if row["checkout"] == "now" and (before := seconds.get((row["way"], "before"))):
            found = estimate([math.log(own / old) for own, old in zip(row["seconds"], before, strict=True)])
            row["of_before"], row["of_before_low"], row["of_before_high"] = map(
                math.exp, (found.mean, found.low, found.high)
            )
        if (row["way"], row["checkout"]) in ((group[0], "now") for group in scene.groups):
            first = row["seconds"]
        row["ratio"] = statistics.median(own / base for own, base in zip(row.pop("seconds"), first, strict=True))
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    parts = [name for name in rows[0] if name.startswith("cpu_ms ")]
    names = [p.removeprefix("cpu_ms ") for p in parts]
    table = Table("hosts", "link", "method", "ms", "ratio", "of before", "link ms", "CPU ms", *names)
    for row in rows:
        label = row["way"] + ("" if row["checkout"] == "now" else f" ({row['checkout']})")
        figures = [f"{row[name]:.1f}" for name in ("link_ms", "cpu_ms", *parts)]
        rate = f"{row['rate_bps'] / 1e6:g} Mbit/s"
        low, high = row.get("of_before_low"), row.get("of_before_high")
        of_before = f"{row['of_before']:.3f} [{low:.3f}, {high:.3f}]" if low else ""
        table.add_row(str(row["hosts"]), rate, label, f"{row['ms']:.1f}", f"{row['ratio']:.2f}", of_before, *figures)
    Console(width=200).print(table)


def print_break_even(rows: list[dict[str, Any]]) -> None:
    """Print the rate at which each method takes as long as bf16."""
    from rich.console import Console
    from rich.table import Table

    table = Table("method", *sorted({row["checkout"] for row in rows}))
    found: dict[str, dict[str, str]] = {}
    for name, checkout in {(row["way"], row["checkout"]): None for row in rows if row["way"] != BF16}:
        own = [row for row in rows if (row["way"], row["checkout"]) == (name, checkout)]
        found.setdefault(name, {})[checkout] = break_even([(row["rate_bps"], row["ratio"]) for row in own])
    for name, by_checkout in found.items():
        table.add_row(name, *(by_checkout.get(column.header, "") for column in table.columns[1:]))
    Console(width=120).print(table)


def break_even(points: list[tuple[float, float]]) -> str:
    """Return the rate at which the ratio reaches 1, interpolated linearly between logarithms.

    Args:
        points: pairs of link rate in bit/s and time relative to bf16.
    """
    points = sorted(points)
    if points[0][1] >= 1:
        return f"below {points[0][0] / 1e6:g} Mbit/s"
    for (low, a), (high, b) in itertools.pairwise(points):
        if a < 1 <= b:
            share = -math.log(a) / (math.log(b) - math.log(a))
            return f"{math.exp(math.log(low) + share * (math.log(high) - math.log(low))) / 1e6:.0f} Mbit/s"
    return f"above {points[-1][0] / 1e6:g} Mbit/s"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows to the file, in place of its rows of the same modes."""
    modes = {row["mode"] for row in rows}
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.DictReader(file) if row["mode"] not in modes]
    rows = [{k: f"{v:.4g}" if isinstance(v, float) and "bps" not in k else v for k, v in row.items()} for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        names = dict.fromkeys(name for row in (*rows, *kept) for name in row)
        writer = csv.DictWriter(file, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])


if __name__ == "__main__":
    sys.exit(main())
