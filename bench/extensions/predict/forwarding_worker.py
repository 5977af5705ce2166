"""Measure what messages between virtual hosts cost; each rank runs this module with the job's folder."""

from __future__ import annotations

import dataclasses
import sys

import torch.distributed as dist

from bench.core.config.job import RanksConfig
from bench.core.counters import forwarder_cpu_s
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, append_json_line
from bench.extensions.predict.calibration import MessageCosts
from bench.extensions.predict.forwarding_cost import carry_byte_s, forwarded_byte_s
from bench.extensions.predict.message_costs import message_costs
from bench.train.rank import end_process, process_group, rank_main, set_up_device
from collectives.transport.sockets import open_transport

LONG_MESSAGES = 5


def run(config: RanksConfig, folder: RunFolder) -> None:
    """Say it in `progress.jsonl`."""
    with process_group(set_up_device("cpu", 1), config.timeout_s):
        transport = open_transport(timeout_s=config.timeout_s)
        costs = message_costs(transport, LONG_MESSAGES) if dist.get_rank() < 2 else MessageCosts()
        dist.barrier()
        is_forwarded = forwarder_cpu_s() is not None
        carried_s = forwarded_byte_s(transport) if is_forwarded else carry_byte_s(transport, costs)
        waited_s = max(0.0, costs.wake_s - (config.latency_s or 0.0))
        costs = dataclasses.replace(costs, wake_s=waited_s, carry_byte_s=carried_s)
        transport.close()
        if dist.get_rank() == 0:
            append_json_line(folder.progress, {"messages": dataclasses.asdict(costs)})


main = rank_main(RanksConfig, run, (BenchError,))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
