"""One rank of `bench collectives`: `python -m bench.micro.collectives_worker FOLDER`, started by torchrun.

What to measure stands in the folder's `config.json`. Rank 0 appends to `progress.jsonl` after every turn, and a row
as soon as a size is done.
"""

from __future__ import annotations

import datetime
import sys
from typing import Any

import torch.distributed as dist

from bench.core.config.measurements import CollectivesConfig
from bench.core.environment import origin_columns
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, append_json_line
from bench.micro.summing import Summing
from bench.micro.synthetic_payloads import make_synthetic_payloads
from bench.micro.turns import in_turns
from bench.train.rank import end_process, link_columns, process_group, rank_main, set_up_device
from collectives.options import OptionError
from collectives.payloads.base import PayloadError
from collectives.transport.base import Transport, TransportError
from collectives.transport.sockets import open_transport


def run(config: CollectivesConfig, folder: RunFolder) -> None:
    """Set up this rank and go through all sizes."""
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    origin = origin_columns(config.device) | {"started_at": started_at}
    device = set_up_device(config.device, config.threads)
    with process_group(device, config.timeout_s):
        transport = open_transport(device=device, timeout_s=config.timeout_s)
        for size in config.sizes_bytes:
            measure(config, size, folder, transport, origin)
        dist.barrier()
        transport.close()


def measure(
    config: CollectivesConfig, size: int, folder: RunFolder, transport: Transport, origin: dict[str, Any]
) -> None:
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
    is_reporter = dist.get_rank() == 0
    for _, summing in in_turns(summings, config.rounds):
        summing.take_turn()
        if is_reporter:
            turn = [summing.collective, summing.compressor, config.size_bytes(size)]
            append_json_line(folder.progress, {"turn": turn})
    shared = config.columns() | link_columns(folder) | origin
    for summing in summings:
        line = {"row": shared | summing.row(), "extras": summing.extras()}
        if is_reporter:
            append_json_line(folder.progress, line)
        summing.close()


main = rank_main(CollectivesConfig, run, (BenchError, OptionError, PayloadError, TransportError))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
