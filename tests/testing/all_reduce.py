"""One rank of a job on virtual hosts: sums a tensor over gloo and writes its measurements.

``python -m torch.distributed.run ... -m tests.testing.all_reduce FOLDER``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench.core.counters import interface_bytes

NUM_FLOATS = 500_000


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensor = torch.full((NUM_FLOATS,), float(rank + 1))
    before, began = interface_bytes(), time.perf_counter()
    dist.barrier()  # all ranks start counting before any rank sends; the barrier's own few bytes count too
    dist.all_reduce(tensor)
    dist.barrier()
    seconds, after = time.perf_counter() - began, interface_bytes()
    seen = {
        "host": int(os.environ["GROUP_RANK"]),
        "sum": [float(tensor.min()), float(tensor.max())],
        "seconds": seconds,
        "sent": after.sent - before.sent,
        "received": after.received - before.received,
    }
    (Path(folder) / f"rank-{rank}").write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
