"""Measure how long a training step of each method takes on a link, for each amount of data that the method sends.

One job on the link times all methods in interleaved blocks, so that slow and fast periods of the machine affect all
methods equally. Times are means, because means add up to the time of a training, and medians do not.
"""

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from typing_extensions import Doc

from bench.core.config.configuration import NOT_GIVEN, NOT_RECORDED
from bench.core.config.run import RanksConfig, RunConfig
from bench.core.counters import OtherWork
from bench.core.errors import RunFailed
from bench.launch.jobs import torchrun
from bench.launch.jobs.failure import WatchdogTimeouts
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.run import measure

WORKER = "bench.deciding.step_times_worker"
MOST_LEVELS = 8
# Steps that send about the same number of bytes, within this factor, are one level.
SAME_LEVEL = 1.02
# Measure until the half width of each mean's interval is at most this share of the mean.
PRECISION = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimesConfig(RanksConfig):
    """The configuration of a job that times steps; the program fills in all fields."""

    methods: Annotated[
        tuple[dict[str, Any], ...],
        Doc("configuration of a run with each method, as `dataclasses.asdict`"),
        NOT_RECORDED,
    ] = ()
    starts: Annotated[
        tuple[list[int], ...], Doc("for each method, the index of one training step of each level"), NOT_RECORDED
    ] = ()
    max_s: Annotated[float, Doc("seconds after which the job begins no further block of steps")] = NOT_GIVEN


def levels_of(intervals: Sequence[tuple[int, int, float]], *, is_one: bool = False) -> list[int]:
    """Group the steps of a training into at most `MOST_LEVELS` levels by the bytes that they send.

    Return the index of one step of each level; the first step of the training has index 0.

    Args:
        intervals: for each interval between two evaluations, (step at which it begins, number of steps, mean bytes that
            a rank sends in one of these steps).
        is_one: put all steps in one level, however many bytes they send.
    """
    groups = [[each] for each in sorted(intervals, key=lambda each: each[2])]

    def distance(number: int) -> float:  # from a group to the next one, as the log of a factor
        below, above = groups[number][-1][2], groups[number + 1][0][2]
        return math.log(above / below) if below > 0 else (math.inf if above > 0 else 0.0)

    while len(groups) > 1:
        nearest = min(range(len(groups) - 1), key=distance)
        if not is_one and len(groups) <= MOST_LEVELS and distance(nearest) > math.log(SAME_LEVEL):
            break
        groups[nearest : nearest + 2] = [groups[nearest] + groups[nearest + 1]]
    return [max(group, key=lambda each: each[1])[0] for group in groups]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkStepTimes:
    """The measured durations of one method's training steps on a link, by level.

    A level is a group of steps that send about the same number of bytes.

    Attributes:
        nbytes: for each level, the mean bytes that a rank sent in a step.
        seconds: [jobs][blocks][levels] mean duration of a step in seconds; jobs may have different numbers of blocks.
        other_cpu_share: [jobs] share of the cores' time that other programs took during the job, from 0 to 1; None if
            unknown. Empty in files of earlier versions.
    """

    nbytes: list[float]
    seconds: list[list[list[float]]]
    other_cpu_share: list[float | None] = dataclasses.field(default_factory=list)

    def training_s(self, steps: Mapping[float, float], job: int | None = None) -> float:
        """Return the duration of a training in seconds, without evaluations.

        Args:
            steps: for each number of bytes that a rank sends in a step, how many such steps the training has. The
                duration of a step is interpolated between the two nearest levels.
            job: index of the job whose times are used; None for the mean over jobs, which all count equally.
        """
        import numpy as np  # takes long

        nbytes, of_jobs, of_all = self._by_bytes
        each_s = np.interp(list(steps), nbytes, of_all if job is None else of_jobs[job])
        return float(np.dot(each_s, list(steps.values())))

    @functools.cached_property
    def _by_bytes(self) -> tuple[Any, Any, Any]:
        """(bytes [levels], ascending; mean seconds of a step in each job [jobs, levels]; mean over jobs [levels])."""
        import numpy as np

        order = np.argsort(self.nbytes)
        of_jobs = np.array([np.mean(blocks, axis=0) for blocks in self.seconds])[:, order]
        return np.asarray(self.nbytes)[order], of_jobs, of_jobs.mean(axis=0)


def joined(measurements: Sequence[Mapping[str, LinkStepTimes]]) -> dict[str, LinkStepTimes]:
    """Combine the step times of several measurements of the same methods on the same link."""
    of_methods = {name: [each[name] for each in measurements] for name in measurements[0]}
    return {
        name: LinkStepTimes(
            nbytes=[statistics.fmean(sent) for sent in zip(*(each.nbytes for each in found), strict=True)],
            seconds=[job for each in found for job in each.seconds],
            other_cpu_share=[share for each in found for share in each.other_cpu_share],
        )
        for name, found in of_methods.items()
    }


def measure_step_times(
    configs: Mapping[str, RunConfig],
    levels: Mapping[str, list[int]],
    server: ForkServer,
    *,
    max_s: float,
    on_block: Callable[[int], None],
) -> dict[str, LinkStepTimes]:
    """Time the steps of all methods in one job, on the link of their configurations.

    Args:
        configs: complete configuration of a run with each method, by the method's name; all have the same ranks.
        levels: for each method, by the same names, the index of one training step at each level.
        server: starts the ranks.
        max_s: seconds after which no further block begins.
        on_block: called after each block with the number of blocks so far.

    Raises:
        RunFailed: a rank failed or hung, or the network could not be set up.
        UsageError: this machine does not support virtual hosts.
        Interrupted: the user stopped the command.
    """
    names = list(configs)
    first = configs[names[0]]
    ranks = {field.name: getattr(first, field.name) for field in dataclasses.fields(RanksConfig)}
    config = StepTimesConfig(
        **ranks,
        methods=tuple(dataclasses.asdict(configs[name]) for name in names),
        starts=tuple(levels[name] for name in names),
        max_s=max_s,
    )
    blocks: list[list[list[float]]] = []

    def take(report: Mapping[str, Any]) -> None:
        if "block" in report:  # other reports tell the progress within a block
            blocks.append(report["block"])
            on_block(len(blocks))

    others = OtherWork(os.getpid())
    others.start()
    measure(
        "decide",
        config,
        lambda folder: torchrun.launch(config, folder, server, WORKER),
        WatchdogTimeouts.with_job(config),
        take,
    )
    others.stop()
    if not blocks:
        raise RunFailed("no step was timed; raise --budget")
    found = {}
    for number, name in enumerate(names):
        own = [[entry[2:] for entry in block if entry[0] == number] for block in blocks]
        found[name] = LinkStepTimes(
            nbytes=[statistics.fmean(sent for _, sent in level) for level in zip(*own, strict=True)],
            seconds=[[[seconds for seconds, _ in block] for block in own]],
            other_cpu_share=[others.share],
        )
    return found
