"""One host of `exchange.py`: run the interleaved methods of exchanging a gradient, and measure each.

    python benchmarks/exchange_worker.py FOLDER all HOST       # start one process per checkout
    python benchmarks/exchange_worker.py FOLDER CHECKOUT HOST  # one of these processes: a rank of its checkout

Each process imports the project from its own checkout; only the modules beside this file are shared.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
# As in a run (`bench/launch/jobs/fork_server.py`): freed memory stays with the process, so that a step does not fault
# its pages in again.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
CONDUCTOR_PORT, FIRST_PORT = 29600, 29700
GRADIENT_SETS = 2


class Worker:
    """One host with a process per checkout, or one of these processes, which is a rank of its checkout.

    Args:
        folder: folder with the plan, to which the rows are written.
        checkout: the checkout that this process imports; "all" starts one process for each.
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
            environment = os.environ | KEEP_MEMORY | {"PYTHONPATH": f"{path}{os.pathsep}{HERE.parent}"}
            line = [sys.executable, str(HERE), str(self.folder), name, str(self.host)]
            process = subprocess.Popen(line, env=environment, cwd=path)
            running[process.pid] = process
        while running:
            pid, status = os.wait()
            running.pop(pid, None)
            if status:
                for process in running.values():
                    process.kill()  # it would wait for the failed process
                return 1
        return 0

    def _measure(self) -> int:
        # An editable installation would add modules of its own checkout to the packages of another one.
        editable = [each for each in sys.meta_path if getattr(each, "__module__", "").startswith("__editable_")]
        sys.meta_path = [each for each in sys.meta_path if each not in editable]
        import torch
        import torch.distributed as dist
        from exchange_parts import PARTS, CpuByPart

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
        # Two checkouts have other functions: timing those of one would slow down only that one.
        self._parts = CpuByPart(PARTS if len(self.plan["checkouts"]) == 1 else {})
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
        """Open all methods of a group, measure them in interleaved rounds of rotating order, and close them."""
        from exchange_ways import Way

        ways = [Way(name=name, checkout=checkout) for name in names for checkout in self._checkouts_of(name)]
        subjects: dict[Way, Subject] = {}
        for way in ways:
            if way.checkout == self.checkout:
                subjects[way] = Subject(way, self.plan, self._parts, self.host)
        for turn in range(-1, self.plan["turns"]):  # the first round fills buckets, buffers and allocators
            for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                mine = way.checkout == self.checkout
                self._in_turn(f"{way.label} {turn}", lambda way=way, turn=turn: subjects[way].take(turn), mine=mine)
        for way in ways:
            mine = way.checkout == self.checkout
            self._in_turn(way.label, lambda way=way: self._report(subjects[way]), mine=mine)
        subjects.clear()
        gc.collect()  # a hook and its model refer to each other

    def _checkouts_of(self, name: str) -> list[str]:
        """Return the checkouts that measure a method: those that have it; one if it is not of this project."""
        if "+" not in name or "alternate" in name:
            return ["now"]
        module = re.split("[+:]", name)[0] + ".py"
        return [each for each, path in self.plan["checkouts"].items() if Path(path, "compressors", module).exists()]

    def _in_turn(self, what: str, work: Any, *, mine: bool) -> None:
        """Do this process's part of the work; all others wait for it, and their wait fails if it fails."""
        key = f"{self._turn} {what}"
        self._turn += 1
        if mine:
            work()
            if self._conductor.add(f"{key} count", 1) == self.plan["hosts"]:
                self._conductor.set(key, "done")
        self._conductor.wait([key])

    def _leave(self) -> None:
        """Wait until all other processes are done if this one holds the store, so that it ends last."""
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
    """One method, with its model and data on this rank."""

    def __init__(self, way: Any, plan: dict[str, Any], parts: Any, rank: int) -> None:
        import torch
        from exchange_ways import Given
        from torch.nn.parallel import DistributedDataParallel

        from bench.core import spec
        from compressors.layer import layers_of

        try:
            from gradwire.ddp.buckets import bucket_size
        except ImportError:  # an earlier checkout
            from bench.strategies.ddp import bucket_size

        torch.manual_seed(1)
        self.way, self.parts, self.per_turn = way, parts, plan["per_turn"]
        self.network = spec.build("models", "resnet18").build(10)
        bucket_mb = bucket_size(layers_of(self.network))
        if way.name == "powersgd of its authors":
            bucket_mb = 2.0**20
        self.model = self.network if plan["images"] else Given(self.network)
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, forward_sync_buffers=False,
        )  # fmt: skip
        self.at_work = way.open(self.ddp)
        parts.watch()
        self.thread = parts._exchange_thread if "+" in way.name else None
        generator = torch.Generator().manual_seed(1)
        self.whole_step = plan["images"] > 0
        if self.whole_step:
            generator.manual_seed(rank)
            self.images = torch.randn(plan["images"], 3, 32, 32, generator=generator)
            self.labels = torch.randint(10, (plan["images"],), generator=generator)
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
        """Measure the exchanges of one round, each after a barrier; those of a negative round are not counted."""
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

        from bench.core.counters import interface_bytes

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
        """Return medians over all exchanges of the slowest rank's seconds and of the ranks' mean CPU seconds."""
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


if __name__ == "__main__":
    sys.exit(Worker(*sys.argv[1:]).run())
