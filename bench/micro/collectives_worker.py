"""One rank of `bench collectives`: `python -m bench.micro.collectives_worker FOLDER`, started by torchrun.

What to measure stands in the folder's `config.json`. Rank 0 appends to `progress.jsonl` after every turn, and a row
as soon as a size is done.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.core.collectives_config import CollectivesConfig
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder
from bench.micro.summing import Summing
from bench.micro.synthetic_payloads import make_synthetic_payloads
from bench.train.measured import link_columns
from bench.train.rank import end_process, process_group, run_as_rank, set_up_device
from collectives.options import OptionError
from collectives.payloads.base import PayloadError
from collectives.transport.base import Transport, TransportError
from collectives.transport.process_group import ProcessGroupTransport

USER_ERRORS = (BenchError, OptionError, PayloadError, TransportError)


def main(path: str) -> int:
    """Measure what the folder's configuration says; return the exit code, 0 or 1."""
    folder = RunFolder(Path(path))
    return run_as_rank(folder, lambda: run(CollectivesConfig.from_json(folder.config), folder), USER_ERRORS)


def run(config: CollectivesConfig, folder: RunFolder) -> None:
    """Set up this rank and go through all sizes."""
    device = set_up_device(config.device, config.threads)
    with process_group(device, config.timeout_s):
        transport = ProcessGroupTransport(device=device, timeout_s=config.timeout_s)
        for size in config.sizes_bytes:
            measure(config, size, folder, transport)
        dist.barrier()


def measure(config: CollectivesConfig, size: int, folder: RunFolder, transport: Transport) -> None:
    """All pairs at one size, taking turns; every rank must call."""
    compressors = dict.fromkeys(compressor for _, compressor in config.pairs)
    offers = {name: make_synthetic_payloads(config, name, config.count(size), transport) for name in compressors}
    summings = [
        Summing(
            config,
            collective=collective,
            compressor=compressor,
            size_bytes=config.size_bytes(size),
            offer=offers[compressor],
            transport=transport,
        )
        for collective, compressor in config.pairs
    ]
    for round_ in range(config.rounds):
        start = round_ % len(summings)  # so that nobody always follows the same neighbour
        for summing in [*summings[start:], *summings[:start]]:
            summing.take_turn()
            _report(folder, {"turn": [summing.collective, summing.compressor, config.size_bytes(size)]})
    shared = config.columns() | link_columns(folder)
    for summing in summings:
        _report(folder, {"row": shared | summing.row(), "extras": summing.extras()})
        summing.close()


def _report(folder: RunFolder, line: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        with folder.progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    end_process(main(sys.argv[1]))
