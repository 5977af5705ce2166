"""Write traces as torch.profiler does: two ranks with an accelerator, whose parts are known by construction.

In each step of 100 ms, rank 0 computes for 60 ms and rank 1, which is late, for 75 ms. Of the two sums, the first is
hidden behind compute. In the second, rank 0 waits for 15 ms, and 15 ms later all have the sum.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NEW = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STEP_MS = 100
NUMEL = 1_000_000
PARTS_MS = {
    0: {"compute_s": 60, "exposed_transfer_s": 15, "exposed_wait_s": 15, "idle_s": 10},
    1: {"compute_s": 75, "exposed_transfer_s": 15, "exposed_wait_s": 0, "idle_s": 10},
}
# When each rank computes and sums, in milliseconds after the beginning of a step.
_COMPUTE = {0: [(5, 45), (45, 65)], 1: [(5, 80)]}
_SUMS = {0: [(30, 60), (65, 95)], 1: [(40, 60), (80, 95)]}


def event(
    name: str, category: str, start_ms: float, end_ms: float, lane: object = 1, **arguments: Any
) -> dict[str, Any]:
    times = {"ts": 1000 * start_ms, "dur": 1000 * (end_ms - start_ms)}
    return {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": lane, "args": arguments, **times}


def described(*, ranks: str = "[0, 1]", group: str = "0") -> dict[str, Any]:
    """Return what newer versions of PyTorch record about a sum."""
    numels = {"In msg nelems": NUMEL, "Out msg nelems": NUMEL, "Group size": 2, "dtype": "BFloat16"}
    return {"Collective name": "allreduce", "Process Group Name": group, "Process Group Ranks": ranks, **numels}


def step_events(
    rank: int, start: float, kernel: str = NEW, arguments: dict[str, Any] | None = None, *, ahead_ms: float = 0
) -> list[dict[str, Any]]:
    """Return the events of a step that begins on the device at `start`; the host launches them `ahead_ms` earlier."""
    arguments = described() if arguments is None else arguments
    works = [("gemm", 7, span, {}) for span in _COMPUTE[rank]]
    works += [(kernel, 20, span, arguments) for span in _SUMS[rank]]
    events = []
    for index, (name, stream, (begin, end), more) in enumerate(works):
        correlation = round(start * 10) + index
        launched = start - ahead_ms + 1
        events.append(event("cudaLaunchKernel", "cuda_runtime", launched, launched + 0.01, correlation=correlation))
        found = event(name, "kernel", start + begin, start + end, stream, correlation=correlation, **more)
        events.append(found)
    return events


def marks(num_steps: int = 2, ahead_ms: float = 0) -> list[dict[str, Any]]:
    spans = [(STEP_MS * number - ahead_ms, STEP_MS * (number + 1) - ahead_ms) for number in range(num_steps)]
    return [event(f"ProfilerStep#{number + 3}", "user_annotation", *span) for number, span in enumerate(spans)]


def about(rank: int, world_size: int = 2, backend: str = "nccl") -> dict[str, Any]:
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": world_size, "ranks": list(range(world_size))}]
    info = {"backend": backend, "rank": rank, "world_size": world_size, "pg_config": groups}
    return {"schemaVersion": 1, "distributedInfo": info}


def write(path: Path, head: dict[str, Any], events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(head | {"traceEvents": events, "traceName": str(path)}, indent=1), encoding="utf-8")
    return path


def write_job(
    folder: Path,
    kernel: str = NEW,
    arguments: dict[str, Any] | None = None,
    *,
    more: list[dict[str, Any]] | None = None,
) -> Path:
    """Write the traces of both ranks into a folder, and return it."""
    for rank in (0, 1):
        events = [each for step in (0, STEP_MS) for each in step_events(rank, step, kernel, arguments)]
        write(folder / f"trace-rank-{rank}.json", about(rank), marks() + events + (more or []))
    return folder
