"""The processes that measure for `bench calibrate`: `python -m bench.micro.calibration_worker FOLDER`.

What to measure stands in the folder's `config.json`; what comes next and what was found go to `progress.jsonl`. Two
processes exchange messages, all of them make steps at once, and the first goes on alone.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from bench.core import environment, spec
from bench.core.config.calibrate import CalibrateConfig
from bench.core.errors import BenchError
from bench.core.parts import LOCAL, VERSION, Crowd, MessageCosts
from bench.core.run_folder import RunFolder, append_json_line
from bench.micro.message_costs import message_costs
from bench.micro.step_parts import StepParts, encoded
from bench.train.rank import end_process, process_group, rank_main, set_up_device
from collectives.transport.sockets import open_transport

LONG_MESSAGES = 40
CROWD_TURNS = 4
WAKE_TURNS = 12
"""of which the mean counts, for rounds that wait for one another add up, the long ones too"""
_AS_GIVEN = ("model", "dataset", "optimizer", "batch_size", "augment", "threads", "bucket_mb")


def run(config: CalibrateConfig, folder: RunFolder) -> None:
    """Messages, the model by itself and among others, then each compressor."""
    device = set_up_device(config.device, config.threads)

    def tell(text: str) -> None:
        if dist.get_rank() == 0:
            append_json_line(folder.progress, {"measuring": text})

    with process_group(device, config.timeout_s):
        tell("messages between two processes")
        messages = _messages(config.timeout_s)
        parts = StepParts(config)
        tell(f"steps of {config.model} by itself")
        # All compressors together may take longer than any one sum may.
        patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
        alone = _alone(config, parts, tell) if dist.get_rank() == 0 else {}
        dist.barrier(cast(dist.ProcessGroup, patient))
        crowds, among_steps = _crowds(parts, tell), _among_steps(parts, config.timeout_s, tell)
        if dist.get_rank() == 0:
            found = {
                **_origin(config),
                **alone,
                "crowds": [dataclasses.asdict(crowd) for crowd in crowds],
                "messages": {LOCAL: dataclasses.asdict(messages)},
                "around_message_s": max(0.0, among_steps.message_s - messages.message_s),
                "crowded_wake_s": among_steps.crowded_wake_s,
            }
            append_json_line(folder.progress, {"calibration": found})


def _messages(timeout_s: float) -> MessageCosts:
    """What they cost the first two ranks; all must call."""
    costs = MessageCosts()
    group = dist.new_group([0, 1])
    if isinstance(group, dist.ProcessGroup):  # a number for ranks outside
        transport = open_transport(group, timeout_s=timeout_s)
        costs = message_costs(transport, LONG_MESSAGES)
        transport.close()
    dist.barrier()
    return costs


def _alone(config: CalibrateConfig, parts: StepParts, tell: Callable[[str], None]) -> dict[str, Any]:
    """Its compute, and what compressors make of its gradients.

    Steps are timed before and behind each compressor, for the machine is faster at one moment than at another.
    """
    texts = spec.split_list(config.compressors)
    steps_at_once = math.ceil(config.repeats / (1 + len(texts)))
    gradients = parts.gradients()
    parts.time_steps(steps_at_once)
    by_compressor = {}
    for text in texts:
        tell(f"encoding by {text}")
        by_compressor[text] = [dataclasses.asdict(bucket) for bucket in encoded(text, gradients, config, parts.stir)]
        parts.time_steps(steps_at_once)
    return dataclasses.asdict(parts.compute()) | {"encoded": by_compressor}


def _crowds(parts: StepParts, tell: Callable[[str], None]) -> list[Crowd]:
    """Steps of one rank, of one on each core, and of all, as far as this rank takes part; all must call.

    They take turns, for cores are faster at one moment than at another.
    """
    cores, most = environment.usable_cores(), dist.get_world_size()
    groups = {number: dist.new_group(list(range(number))) for number in sorted({1, min(cores, most), most})}
    found: dict[int, list[Crowd]] = {}
    for _ in range(CROWD_TURNS):
        for number, group in groups.items():
            tell(f"steps of {number} at once")
            if isinstance(group, dist.ProcessGroup):  # a number for ranks outside
                found.setdefault(number, []).append(parts.crowd(group, cores))
            dist.barrier()
    return [_mean(turns) for turns in found.values()]


def _mean(crowds: Sequence[Crowd]) -> Crowd:
    return Crowd(
        load=crowds[0].load,
        handed_over_s=tuple(map(statistics.fmean, zip(*(crowd.handed_over_s for crowd in crowds), strict=True))),
        computed_s=statistics.fmean(crowd.computed_s for crowd in crowds),
        cpu_s=statistics.fmean(crowd.cpu_s for crowd in crowds),
    )


class _AmongSteps(NamedTuple):
    """What messages take there: of a rank's CPU, and longer by the clock than where nothing is computed."""

    message_s: float
    crowded_wake_s: float


def _among_steps(parts: StepParts, timeout_s: float, tell: Callable[[str], None]) -> _AmongSteps:
    """Of all ranks; all must call."""
    tell("messages among steps")
    transport, group = open_transport(timeout_s=timeout_s), dist.group.WORLD
    assert group is not None
    message_s = parts.around_message_s(group, transport)
    later_s = []
    for _ in range(WAKE_TURNS):
        by_itself_s, beside_s = (parts.round_s(group, transport, computing=computing) for computing in (False, True))
        later_s.append(beside_s - by_itself_s)
    transport.close()
    return _AmongSteps(message_s=message_s, crowded_wake_s=max(0.0, statistics.fmean(later_s)))


def _origin(config: CalibrateConfig) -> dict[str, Any]:
    origin = environment.origin_columns()
    return {
        "version": VERSION,
        "cpu": environment.cpu_model(),
        "cores": environment.usable_cores(),
        "torch_version": origin["torch_version"],
        "kernels": origin["kernels"],
        **{name: getattr(config, name) for name in _AS_GIVEN},
    }


main = rank_main(CalibrateConfig, run, (BenchError,))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
