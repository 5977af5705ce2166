"""Measure the memory that each compressor adds to a training step: two ranks on this machine, ResNet-18 in DDP.

Every method trains for a few steps in fresh processes. The peak is the largest resident memory of a rank while it
trains (VmHWM, reset before training where the kernel allows it). What a method adds is its peak minus that of `none`,
or of DDP without a hook, in units of the gradient's bytes. Between two steps, `hook.nbytes` says what a hook holds, and
the C library's allocator how much more memory is in use than without a hook (`mallinfo2`, Linux only):

    python benchmarks/hook_memory.py [--steps 6] [--batch-size 8] [--csv results/reference/hook-memory.csv]

Peaks of the same method differ by up to half a gradient, because the C library keeps freed memory. --repeats
measures all methods several times and prints medians.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.core import spec
from bench.core.environment import origin_columns
from compressors.layer import layers_of
from gradwire.ddp.attach import attach
from gradwire.ddp.buckets import bucket_size

DDP = "ddp"  # without a hook
WAYS = (
    (DDP, "native"),
    ("none", "native"),
    ("group_topk:ratio=0.01,warmup_epochs=0", "ring"),
    ("topk:ratio=0.01,warmup_epochs=0", "allgather"),
    ("powersgd", "native"),
    ("hylo", "server:placement=sharded"),
    ("algc:warmup_epochs=0", "server:placement=sharded"),
    ("qsgd", "allgather"),
)


class _Allocated(ctypes.Structure):
    """The result of `mallinfo2` (glibc 2.33): bytes and counts."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def bytes_in_use() -> int:
    """Return the bytes that this process has allocated with the C library and not freed.

    MKL keeps buffers of its own for matrix products (half a gradient with PowerSGD); they are freed first.
    """
    with contextlib.suppress(AttributeError, OSError):  # torch without MKL
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so")).mkl_serv_free_buffers()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Allocated
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def train(rank: int, store: str, compressor: str, collective: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps; return the gradient's bytes, the peak, and what is held at the end, all in bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(1)
    network = spec.build("models", "resnet18").build(10)
    gradient_nbytes = sum(parameter.nbytes for parameter in network.parameters())
    ddp = DistributedDataParallel(
        network, bucket_cap_mb=bucket_size(layers_of(network)), gradient_as_bucket_view=True, forward_sync_buffers=False
    )
    hook = None if compressor == DDP else attach(ddp, compressor, collective)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    with contextlib.suppress(OSError):  # not allowed in some containers
        Path("/proc/self/clear_refs").write_text("5")
    for _ in range(options.steps):
        x = torch.randn(options.batch_size, 3, 32, 32, generator=generator)
        y = torch.randint(10, (options.batch_size,), generator=generator)
        nn.functional.cross_entropy(ddp(x), y).backward()
        if hook is None or hook.step_ok():
            optimizer.step()
        optimizer.zero_grad()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = {} if hook is None else hook.nbytes
    gc.collect()
    dist.barrier()
    in_use = bytes_in_use()
    if hook is not None:
        hook.close()
    peak = 1024 * int(status["VmHWM"].split()[0])
    return {"gradient_bytes": gradient_nbytes, "peak_bytes": peak, "in_use_bytes": in_use, "held": held}


def measure(compressor: str, collective: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the rank with the larger peak."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, __file__, "--steps", str(options.steps), "--batch-size", str(options.batch_size)]
        work = [f"{folder}/store", compressor, collective]
        ranks = [
            subprocess.Popen([*line, "--rank", str(rank), *work], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        texts = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{compressor} on {collective} failed")
    found: dict[str, Any] = max((json.loads(text) for text in texts), key=lambda each: each["peak_bytes"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1, help="repetitions of each method, interleaved")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("work", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(train(options.rank, *options.work, options)))
        return 0
    found = [[measure(*way, options) for way in WAYS] for _ in range(options.repeats)]
    unit = found[0][0]["gradient_bytes"]

    def above(column: str, number: int, other: int) -> str:
        """Return by how much method `number` exceeds another one, in gradients, median over the repetitions."""
        return f"{statistics.median(each[number][column] - each[other][column] for each in found) / unit:.2f}"

    rows = []
    for number, (compressor, collective) in enumerate(WAYS):
        held = found[-1][number]["held"]
        rows.append(
            {
                "compressor": compressor,
                "collective": collective,
                "peak_bytes": int(statistics.median(each[number]["peak_bytes"] for each in found)),
                "peak_above_ddp": above("peak_bytes", number, 0),
                "peak_above_none": above("peak_bytes", number, 1),
                "in_use_above_ddp": above("in_use_bytes", number, 0),
                "nbytes": f"{sum(held.values()) / unit:.2f}",
                "held": " ".join(f"{name}={nbytes}" for name, nbytes in held.items() if nbytes),
                "repeats": options.repeats,
            }
            | origin_columns()
        )
    headings = {
        "compressor": "compressor", "collective": "collective", "peak_bytes": "peak, bytes",
        "peak_above_ddp": "above DDP", "peak_above_none": "above none", "in_use_above_ddp": "in use above DDP",
        "nbytes": "hook.nbytes",
    }  # fmt: skip
    table = Table(*headings.values(), caption="in gradients, except for the peak")
    for row in rows:
        table.add_row(*(str(row[name]) for name in headings))
    Console(width=140).print(table)
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
