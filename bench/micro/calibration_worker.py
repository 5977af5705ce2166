"""The processes that measure for `bench calibrate`: `python -m bench.micro.calibration_worker FOLDER`.

What to measure stands in the folder's `config.json`; what comes next and what was found go to `progress.jsonl`. Two
processes exchange messages, then the first goes on alone.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
import torch.distributed as dist

from bench.core import environment, spec
from bench.core.calibrate_config import CalibrateConfig
from bench.core.errors import BenchError
from bench.core.parts import VERSION
from bench.core.run_folder import RunFolder, append_json_line
from bench.micro.message_costs import message_costs
from bench.micro.step_parts import StepParts, alone_in_a_group, encoded
from bench.train.rank import end_process, process_group, rank_main, set_up_device

_AS_GIVEN = ("model", "dataset", "optimizer", "batch_size", "threads", "bucket_mb")


def run(config: CalibrateConfig, folder: RunFolder) -> None:
    """Messages, the model by itself, then each compressor."""
    device = set_up_device(config.device, 1)

    def tell(text: str) -> None:
        append_json_line(folder.progress, {"measuring": text})

    with process_group(device, config.timeout_s):
        rank = dist.get_rank()
        if rank == 0:
            tell("messages between two processes")
        message_s, byte_s = message_costs(config.timeout_s)
        dist.barrier()
    if rank != 0:
        return
    torch.set_num_threads(config.threads)
    with alone_in_a_group():
        tell(f"steps of {config.model} by itself")
        parts = StepParts(config)
        compute, gradients = parts.compute(), parts.gradients()
    by_compressor = {}
    for text in spec.split_list(config.compressors):
        tell(f"encoding by {text}")
        by_compressor[text] = [dataclasses.asdict(bucket) for bucket in encoded(text, gradients, config)]
    origin = environment.origin_columns()
    found = {
        "version": VERSION,
        "cpu": environment.cpu_model(),
        "cores": environment.usable_cores(),
        "torch_version": origin["torch_version"],
        "kernels": origin["kernels"],
        **{name: getattr(config, name) for name in _AS_GIVEN},
        **dataclasses.asdict(compute),
        "encoded": by_compressor,
        "message_s": message_s,
        "byte_s": byte_s,
    }
    append_json_line(folder.progress, {"calibration": found})


main = rank_main(CalibrateConfig, run, (BenchError,))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
