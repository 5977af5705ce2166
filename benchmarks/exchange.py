"""What one exchange of ResNet-18's gradient takes on virtual hosts: seconds, and CPU milliseconds by part.

An exchange is everything between the gradients and the update, in the buckets that a run uses; the gradients are given,
so that no backward is in the way. Ways take turns on the same hosts; figures are medians over all turns of the slowest
rank's seconds and of the mean CPU seconds of a rank.

    python benchmarks/exchange.py                                 # four hosts at 100 Mbit/s; two at 1 Gbit/s
    python benchmarks/exchange.py --against CHECKOUT              # beside another checkout of this project
    python benchmarks/exchange.py --step [--against CHECKOUT]     # a whole training step beside one without exchange
    python benchmarks/exchange.py --powersgd                      # beside the formula of its authors' package
    python benchmarks/exchange.py --break-even [--against CHECKOUT]  # two hosts with a core each: where bf16 is faster

`link_ms` is what the busiest host's frames need on the link; `of_link` how much of the exchange that fills; `ratio` the
median over turns of the time beside the first way's. The table's rows replace those of the same mode in `--csv`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import gc
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
RESULTS = ROOT / "results" / "reference" / "exchange.csv"
GROUP_TOPK, BF16 = "group_topk+allgather", "bf16 by gloo"
BREAK_EVEN_RATES = (100e6, 300e6, 1e9, 3e9, 10e9)
CONDUCTOR_PORT, FIRST_PORT = 29600, 29700
GRADIENT_SETS = 2
IMAGES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """One cluster and what takes turns on it.

    Attributes:
        mode: names the rows in the file.
        hosts, rate_bps: of the cluster.
        groups: ways that take turns; one group after the other, so that not all need memory at once.
        whole_step: a training step with real images in place of a given gradient.
        own_core: host i runs on core i alone.
    """

    mode: str
    hosts: int
    rate_bps: float
    groups: tuple[tuple[str, ...], ...]
    whole_step: bool = False
    own_core: bool = False


def scenes(options: argparse.Namespace) -> list[Scene]:
    if options.step:
        return [Scene(mode="step", hosts=4, rate_bps=100e6, groups=(("nothing", GROUP_TOPK),), whole_step=True)]
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
    """Every compressor on the collective that it rides by default."""
    from bench.core import registry, spec

    pairs = []
    for name in registry.entries("compressors"):
        compressor = spec.build("compressors", name)
        if compressor.engine_hook or compressor.chooses or name == "none":
            continue
        fitting = [
            collective
            for collective in compressor.default_collectives
            if compressor.refusal(spec.build("collectives", collective)) is None
        ]
        pairs.append(f"{name}+{fitting[0]}")
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--step", action="store_true", help="a whole training step beside one without exchange")
    mode.add_argument("--powersgd", action="store_true", help="PowerSGD beside the formula of its authors' package")
    mode.add_argument("--break-even", action="store_true", help="the link rate above which dense bf16 is faster")
    parser.add_argument("--against", type=Path, help="another checkout of this project, say of the commit before")
    parser.add_argument("--ways", nargs="+", help="COMPRESSOR+COLLECTIVE, usual, nothing, 'bf16 by gloo': these alone")
    parser.add_argument("--hosts", type=int, choices=(2, 4), help="of both clusters only that of so many hosts")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--per-turn", type=int, default=2, help="exchanges in a turn")
    parser.add_argument("--csv", type=Path, help=f"write the rows there, {RESULTS.relative_to(ROOT)} say")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return Worker(*options.worker).run()
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
    """Start the hosts, with a process per checkout on each, and read what they measured."""
    from bench.hosts.cluster import Cluster, HostLink
    from bench.hosts.job import start_hosts

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

        def command(host: int) -> tuple[list[str], dict[str, str]]:
            return [sys.executable, str(HERE), "--worker", str(folder), "all", str(host)], {
                "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
            }  # fmt: skip

        job = start_hosts(cluster, folder, command)
        if code := job.wait():
            raise SystemExit(f"a host failed with exit code {code}")
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    first: list[float] = []
    for row in rows:  # in the order of the groups, whose first way the others are set beside
        if (row["way"], row["checkout"]) in ((group[0], "now") for group in scene.groups):
            first = row["seconds"]
        row["ratio"] = statistics.median(own / base for own, base in zip(row.pop("seconds"), first, strict=True))
    return rows


class Worker:
    """One host: a process per checkout, or one of these processes, which is a rank among its checkout's.

    Args:
        folder: holds the plan; gets the rows.
        checkout: which one this process imports; "all" starts one process for each.
        host: number of this host.
    """

    def __init__(self, folder: str, checkout: str, host: str) -> None:
        self.folder, self.checkout, self.host = Path(folder), checkout, int(host)
        self.plan = json.loads((self.folder / "plan.json").read_text())

    def run(self) -> int:
        if self.checkout != "all":
            return self._measure()
        running: dict[int, subprocess.Popen[bytes]] = {}
        for name, path in self.plan["checkouts"].items():
            environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{HERE.parent}"}
            line = [sys.executable, str(HERE), "--worker", str(self.folder), name, str(self.host)]
            process = subprocess.Popen(line, env=environment, cwd=path)
            running[process.pid] = process
        while running:
            pid, status = os.wait()
            running.pop(pid, None)
            if status:
                for process in running.values():
                    process.kill()  # it would wait for the other's turns
                return 1
        return 0

    def _measure(self) -> int:
        import torch
        import torch.distributed as dist
        from exchange_parts import CpuByPart

        torch.set_num_threads(1)
        if self.plan["own_core"]:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[self.host % len(cores)]})
        number = list(self.plan["checkouts"]).index(self.checkout)
        self.holds_store = (self.host, number) == (0, 0)
        self._conductor = dist.TCPStore(
            self.plan["address"], CONDUCTOR_PORT, is_master=self.holds_store, wait_for_workers=False,
            timeout=timedelta(seconds=600),
        )  # fmt: skip
        self._parts = CpuByPart()
        dist.init_process_group(
            "gloo", init_method=f"tcp://{self.plan['address']}:{FIRST_PORT + number}", rank=self.host,
            world_size=self.plan["hosts"], timeout=timedelta(seconds=600),
        )  # fmt: skip
        self._turn = 0
        for group in self.plan["groups"]:
            self._run_group(group)
        self._leave()
        dist.destroy_process_group()
        return 0

    def _run_group(self, names: list[str]) -> None:
        """All ways of a group, opened, taking turns in an order that rotates, and closed."""
        from exchange_ways import Way

        ways = [Way(name=name, checkout=checkout) for name in names for checkout in self._checkouts_of(name)]
        subjects: dict[Way, Subject] = {}
        for way in ways:
            if way.checkout == self.checkout:
                subjects[way] = Subject(way, self.plan, self._parts, self.host)
        for turn in range(-1, self.plan["turns"]):  # the first one fills buckets, buffers and allocators
            for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                mine = way.checkout == self.checkout
                self._in_turn(f"{way.label} {turn}", lambda way=way, turn=turn: subjects[way].take(turn), mine=mine)
        for way in ways:
            mine = way.checkout == self.checkout
            self._in_turn(way.label, lambda way=way: self._report(subjects[way]), mine=mine)
        subjects.clear()
        gc.collect()  # a hook and its model hold each other

    def _checkouts_of(self, name: str) -> list[str]:
        """Only this project's own ways differ between its checkouts; some did not have all of them."""
        if "+" not in name or "alternate" in name:
            return ["now"]
        module = re.split("[+:]", name)[0] + ".py"
        return [each for each, path in self.plan["checkouts"].items() if Path(path, "compressors", module).exists()]

    def _in_turn(self, what: str, work: Any, *, mine: bool) -> None:
        """Work while all others wait for it; a process that fails lets the others' wait end."""
        key = f"{self._turn} {what}"
        self._turn += 1
        if mine:
            work()
            if self._conductor.add(f"{key} count", 1) == self.plan["hosts"]:
                self._conductor.set(key, "done")
        self._conductor.wait([key])

    def _leave(self) -> None:
        """The process that holds the store goes last."""
        num_others = self.plan["hosts"] * len(self.plan["checkouts"]) - 1
        if self.holds_store:
            self._conductor.wait(["left"])
        elif self._conductor.add("leaving", 1) == num_others:
            self._conductor.set("left", "all")

    def _report(self, subject: Subject) -> None:
        row = subject.row(self.plan)
        subject.close()
        if self.host == 0:
            with (self.folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


class Subject:
    """One way at work on this rank."""

    def __init__(self, way: Any, plan: dict[str, Any], parts: Any, rank: int) -> None:
        import torch
        from exchange_ways import Given
        from torch.nn.parallel import DistributedDataParallel

        from bench.core import spec
        from bench.strategies.ddp import Ddp

        torch.manual_seed(1)
        self.way, self.parts, self.per_turn = way, parts, plan["per_turn"]
        self.network = spec.build("models", "resnet18").build(10)
        megabytes = sum(p.numel() for p in self.network.parameters()) * 4 / 2**20
        bucket_mb = Ddp().default_bucket_mb(megabytes, spec.build("optimizers", "sgd"))
        if way.name == "powersgd of its authors":
            bucket_mb = 2.0**20
        self.model = self.network if plan["whole_step"] else Given(self.network)
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, forward_sync_buffers=False,
        )  # fmt: skip
        self.at_work = way.open(self.ddp)
        parts.watch()
        self.thread = parts._exchange_thread if "+" in way.name else None
        generator = torch.Generator().manual_seed(1)
        self.whole_step = plan["whole_step"]
        if self.whole_step:
            generator.manual_seed(rank)
            self.images = torch.randn(IMAGES, 3, 32, 32, generator=generator)
            self.labels = torch.randint(10, (IMAGES,), generator=generator)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        else:
            means = [0.3 * torch.randn(p.shape, generator=generator) for p in self.model.parameters()]
            generator.manual_seed(2 + rank)
            noises = [[torch.randn(mean.shape, generator=generator) for mean in means] for _ in range(GRADIENT_SETS)]
            self.sets = [[m + n * n.abs() for m, n in zip(means, noise, strict=True)] for noise in noises]
        self.seconds: list[float] = []
        self.cpu: list[dict[str, float]] = []
        self.sent: list[float] = []

    def take(self, turn: int) -> None:
        """So many exchanges, each after a barrier; those of a negative turn are not counted."""
        for number in range(self.per_turn):
            with self._measured(counts=turn >= 0):
                self._step() if self.whole_step else self._exchange(number)

    def _exchange(self, number: int) -> None:
        self.loss.backward()
        self.at_work.finish()

    def _step(self) -> None:
        from torch import nn

        nn.functional.cross_entropy(self.ddp(self.images), self.labels).backward()
        self.at_work.finish()
        self.optimizer.step()

    @contextlib.contextmanager
    def _measured(self, *, counts: bool) -> Iterator[None]:
        import torch.distributed as dist

        from bench.core.interface import interface_bytes

        self.ddp.zero_grad()
        if not self.whole_step:
            gradients = self.sets[len(self.seconds) % GRADIENT_SETS]
            self.model.gradients[:] = [gradient.clone() for gradient in gradients]
            self.loss = self.ddp()
        self.parts._exchange_thread = self.thread
        dist.barrier()
        before = interface_bytes().sent
        self.parts.start()
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        cpu = self.parts.stop()
        dist.barrier()
        if counts:
            self.seconds.append(seconds)
            self.cpu.append(cpu)
            self.sent.append(interface_bytes().sent - before)

    def row(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Medians over all exchanges: of the slowest rank's seconds, and of a rank's mean CPU seconds."""
        import torch
        import torch.distributed as dist
        from exchange_parts import ALL

        from bench.core.environment import origin_columns

        slowest, sent = torch.tensor(self.seconds).double(), torch.tensor(self.sent).double()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(sent, dist.ReduceOp.MAX)
        cpu = torch.tensor([[parts[name] for name in ALL] for parts in self.cpu]).double()
        dist.all_reduce(cpu)
        by_part = 1e3 * (cpu / dist.get_world_size()).median(0).values
        link_s = 8 * float(sent.median()) / plan["rate_bps"]
        seconds = float(slowest.median())
        return {
            "mode": plan["mode"],
            "hosts": plan["hosts"],
            "rate_bps": plan["rate_bps"],
            "way": self.way.name,
            "checkout": self.way.checkout,
            "seconds": slowest.tolist(),
            "ms": 1e3 * seconds,
            "ms_min": 1e3 * float(slowest.min()),
            "ms_max": 1e3 * float(slowest.max()),
            "link_ms": 1e3 * link_s,
            "of_link": link_s / seconds,
            "cpu_ms": 1e3 * float((cpu.sum(1) / dist.get_world_size()).median()),
            **{f"cpu_ms {name}": float(value) for name, value in zip(ALL, by_part, strict=True)},
            "exchanges": len(self.seconds),
        } | origin_columns()

    def close(self) -> None:
        self.at_work.close()


def print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    parts = [name for name in rows[0] if name.startswith("cpu_ms ")]
    table = Table(
        "hosts", "link", "way", "ms", "ratio", "link ms", "CPU ms", *(p.removeprefix("cpu_ms ") for p in parts)
    )
    for row in rows:
        label = row["way"] + ("" if row["checkout"] == "now" else f" ({row['checkout']})")
        figures = [f"{row[name]:.1f}" for name in ("link_ms", "cpu_ms", *parts)]
        rate = f"{row['rate_bps'] / 1e6:g} Mbit/s"
        table.add_row(str(row["hosts"]), rate, label, f"{row['ms']:.1f}", f"{row['ratio']:.2f}", *figures)
    Console(width=200).print(table)


def print_break_even(rows: list[dict[str, Any]]) -> None:
    """Per way, the rate at which it takes as long as bf16, by straight lines between logarithms."""
    from rich.console import Console
    from rich.table import Table

    table = Table("way", *sorted({row["checkout"] for row in rows}))
    found: dict[str, dict[str, str]] = {}
    for name, checkout in {(row["way"], row["checkout"]): None for row in rows if row["way"] != BF16}:
        own = [row for row in rows if (row["way"], row["checkout"]) == (name, checkout)]
        found.setdefault(name, {})[checkout] = break_even([(row["rate_bps"], row["ratio"]) for row in own])
    for name, by_checkout in found.items():
        table.add_row(name, *(by_checkout.get(column.header, "") for column in table.columns[1:]))
    Console(width=120).print(table)


def break_even(points: list[tuple[float, float]]) -> str:
    """(rate, time beside bf16), ascending -> the rate at which the ratio reaches 1."""
    points = sorted(points)
    if points[0][1] >= 1:
        return f"below {points[0][0] / 1e6:g} Mbit/s"
    for (low, a), (high, b) in itertools.pairwise(points):
        if a < 1 <= b:
            share = -math.log(a) / (math.log(b) - math.log(a))
            return f"{math.exp(math.log(low) + share * (math.log(high) - math.log(low))) / 1e6:.0f} Mbit/s"
    return f"above {points[-1][0] / 1e6:g} Mbit/s"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the rows of these modes."""
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
