"""Measure for `bench calibrate`: each process runs `python -m bench.extensions.predict.calibration_worker FOLDER`.

What to measure stands in the folder's `config.json`. Each part goes to `progress.jsonl` when it is measured: two
processes exchange messages, the first rank computes and encodes by itself, and all of them make steps at once. A budget
of seconds is shared among the parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from bench.core import environment, spec
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, append_json_line
from bench.extensions.predict.calibration import LOCAL, MessageCosts
from bench.extensions.predict.message_costs import message_costs
from bench.extensions.predict.options import CalibrateConfig
from bench.extensions.predict.step_parts import CROWDED_STEPS, LEAST_TURNS, RANKS, StepParts, bucket_parts, encoded
from bench.train.rank import end_process, process_group, rank_main, set_up_device
from collectives.transport.sockets import open_transport

# Seconds of parts that are assumed to have taken as long as expected, before anything was measured.
PRIOR_S = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredPart:
    """One part, and what it is expected to take.

    Attributes:
        text: names it, for people and in the file of what was measured.
        once_s: seconds that it takes however often its measurement is repeated.
        fixed_s: seconds of a repetition.
        full, least: repetitions where there is time for all, and where there is hardly any.
    """

    text: str
    once_s: float = 0.0
    fixed_s: float = 0.0
    full: int = 1
    least: int = 1

    def takes_s(self, repetitions: float) -> float:
        """Return the expected seconds."""
        return self.once_s + self.fixed_s * repetitions

    @property
    def extra_s(self) -> float:
        """Return the expected seconds of all repetitions above the least."""
        return self.fixed_s * (self.full - self.least)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allotment:
    """The repetitions that a part may make, and the seconds it may take if a repetition's length is unknown."""

    repetitions: int
    seconds: float = math.inf


class Budget:
    """Give each part its full repetitions if the time suffices for all.

    Else each gets the same number of seconds for repetitions above the least, and a short one no more than it needs: so
    short measurements are repeated as often as ever, and long ones, which average over more by themselves, less often.
    What was measured so far corrects what is expected of the rest: it takes longer where other work is going on.

    Args:
        parts: in their order.
        left_s: for all of them.
        clock: seconds.
    """

    def __init__(
        self, parts: Sequence[MeasuredPart], left_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rest = list(parts)
        self._clock = clock
        self._ends = clock() + left_s
        self._expected_s, self._took_s = 0.0, 0.0

    def skip(self) -> None:
        """Leave out the next part, which was measured before."""
        self._rest.pop(0)

    def allot(self) -> Allotment:
        """Return what the next part may take."""
        part, extra_s = self._rest[0], self._extra_s()
        if self._pace * part.extra_s <= extra_s:
            repetitions = part.full
        else:
            repetitions = part.least + int(extra_s / (self._pace * part.fixed_s))
        return Allotment(repetitions=repetitions, seconds=self._pace * part.takes_s(part.least) + extra_s)

    @property
    def left_s(self) -> float:
        """Return the seconds that the rest is expected to take."""
        extra_s, pace = self._extra_s(), self._pace
        return sum(pace * part.takes_s(part.least) + min(extra_s, pace * part.extra_s) for part in self._rest)

    def made(self, repetitions: int, seconds: float) -> None:
        """Note what the next part took, which is then over."""
        self._expected_s += self._rest.pop(0).takes_s(repetitions)
        self._took_s += seconds

    def _extra_s(self) -> float:
        """Return the seconds that each part may take for repetitions above the least."""
        slack_s = self._ends - self._clock() - self._pace * sum(part.takes_s(part.least) for part in self._rest)
        wanted = sorted(self._pace * part.extra_s for part in self._rest)
        for index, seconds in enumerate(wanted):
            if seconds > (equal_s := slack_s / (len(wanted) - index)):
                return max(0.0, equal_s)
            slack_s -= seconds
        return math.inf

    @property
    def _pace(self) -> float:
        """Return seconds that parts took / seconds that were expected; 1 before much was measured."""
        return (self._took_s + PRIOR_S) / (self._expected_s + PRIOR_S)


LONG_MESSAGES = 40
CROWD_ROUNDS = 4
STEPS = "steps of one rank"
# Repetitions whose mean counts, because rounds that wait for one another add up, the long ones too.
WAKE_TURNS, LEAST_WAKE_TURNS = 12, 2
# Seconds that are expected before anything is measured: for messages between two processes, for an element that is
# encoded, for a round of short messages among ranks that compute, and for a part that the launcher measures.
MESSAGES_S, ENCODE_S, WAKE_S, LATER_S = 3.0, 3e-9, 0.5, 20.0


class Measured(NamedTuple):
    """The figures that a part measured, as plain values, and how many of the planned repetitions it made."""

    values: dict[str, Any]
    counts: tuple[tuple[str, int, int], ...] = ()


class Measurement(NamedTuple):
    """A part, and what measures it; every rank calls."""

    part: MeasuredPart
    measure: Callable[[Allotment], Measured]


def run(config: CalibrateConfig, folder: RunFolder) -> None:
    """Go through all parts that were not measured before."""
    device = set_up_device(config.device, config.threads)
    ends = time.monotonic() + config.left_s
    with process_group(device, config.timeout_s):
        go_through = _GoThrough(config, folder)
        messages = Measurement(
            MeasuredPart(text="messages between two processes", once_s=MESSAGES_S), lambda _: _messages(config)
        )
        go_through([messages], Budget([messages.part], ends - time.monotonic()), is_foreseen=False)
        if go_through.all_are_done:
            return
        parts = StepParts(config)
        tasks = [*_alone(config, parts), *_together(config, parts)]
        later = [MeasuredPart(text=text, once_s=LATER_S) for text in config.later if text not in config.done]
        budget = Budget([*(task.part for task in tasks), *later], ends - time.monotonic())
        go_through(tasks, budget, is_foreseen=True)


class _GoThrough:
    """Go through measurements one after the other; rank 0 decides how often each is repeated, and reports it.

    Args:
        config: complete.
        folder: of the job.
    """

    def __init__(self, config: CalibrateConfig, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        # All compressors together may take longer than any one sum may.
        self._patient = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1)))
        self._number = 0
        self._own = 1 + 1 + len(spec.split_list(config.compressors)) + CROWD_ROUNDS + 2

    @property
    def all_are_done(self) -> bool:
        """Return whether everything that these processes measure was measured before."""
        return len(set(self._config.done) - set(self._config.later)) >= self._own

    def __call__(self, tasks: Sequence[Measurement], budget: Budget, *, is_foreseen: bool) -> None:
        """Measure each part with what the budget allots to it.

        Args:
            tasks: in their order.
            budget: of their parts, and of those that the launcher measures.
            is_foreseen: the budget holds all that is left, so that it tells the time until the end.
        """
        for task in tasks:
            self._number += 1
            if task.part.text in self._config.done:
                budget.skip()
                continue
            allotment = self._agreed(budget.allot())
            self._tell(
                {
                    "measuring": task.part.text,
                    "number": self._number,
                    "of": self._own + len(self._config.later),
                    "left_s": budget.left_s if is_foreseen else None,
                }
            )
            started = time.monotonic()
            found = task.measure(allotment)
            budget.made(allotment.repetitions, time.monotonic() - started)
            self._tell({"part": task.part.text, "found": found.values, "counts": found.counts})

    def _agreed(self, allotment: Allotment) -> Allotment:
        """Return the allotment of rank 0, on all ranks."""
        of_rank_0 = torch.tensor([allotment.repetitions, allotment.seconds], dtype=torch.float64)
        dist.broadcast(of_rank_0, 0, self._patient)
        repetitions, seconds = of_rank_0.tolist()
        return Allotment(repetitions=int(repetitions), seconds=seconds)

    def _tell(self, report: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            append_json_line(self._folder.progress, report)


def _messages(config: CalibrateConfig) -> Measured:
    """Measure the cost of messages between the first two ranks."""
    costs = MessageCosts()
    group = dist.new_group([0, 1])
    if isinstance(group, dist.ProcessGroup):  # a number for ranks outside
        transport = open_transport(group, timeout_s=config.timeout_s)
        costs = message_costs(transport, LONG_MESSAGES)
        transport.close()
    dist.barrier()
    return Measured({"messages": {LOCAL: dataclasses.asdict(costs)}})


def _alone(config: CalibrateConfig, parts: StepParts) -> list[Measurement]:
    """Return the measurements of rank 0's compute, and of what compressors make of its gradients.

    Steps are timed before and after each compressor, because the machine is faster at one moment than at another.
    """
    texts = spec.split_list(config.compressors)
    steps_at_once = math.ceil(config.repeats / (1 + len(texts)))
    gradients = functools.cache(parts.gradients)

    def steps(allotment: Allotment) -> Measured:
        buckets = [dataclasses.asdict(bucket_parts(0.0, layers)) for layers, _ in gradients()[0]]
        parts.time_steps(allotment.repetitions)
        times = parts.take_times()
        return Measured({"buckets": buckets, "times": times}, ((STEPS, len(times), RANKS + steps_at_once),))

    def encoding(text: str, allotment: Allotment) -> Measured:
        count = steps_at_once * allotment.repetitions // config.turns
        buckets, turns = encoded(text, gradients(), config, parts.stir, allotment.seconds - count * parts.step_s)
        parts.time_steps(count)
        times = parts.take_times()
        values = {"encoded": {text: [dataclasses.asdict(bucket) for bucket in buckets]}, "times": times}
        return Measured(values, ((STEPS, len(times), steps_at_once), ("encodings", turns, config.turns)))

    step_s, least = parts.step_s, min(LEAST_TURNS, config.turns)
    first = MeasuredPart(text="one rank computing", once_s=RANKS * step_s, fixed_s=step_s, full=steps_at_once, least=0)
    encode_s = ENCODE_S * parts.numel
    stir_all_s = parts.num_buckets * parts.stir_s
    # A repetition encodes for every rank, and stirs before the buckets of one; what is done to messages stirs twice.
    turn_s = 2 * RANKS * encode_s + 3 * stir_all_s + steps_at_once / config.turns * step_s
    return [
        Measurement(first, _by_rank_0(steps)),
        *(
            Measurement(
                MeasuredPart(
                    text=f"encoding by {text}", once_s=RANKS * encode_s, fixed_s=turn_s, full=config.turns, least=least
                ),
                _by_rank_0(functools.partial(encoding, text)),
            )
            for text in texts
        ),
    ]


def _together(config: CalibrateConfig, parts: StepParts) -> list[Measurement]:
    """Return the measurements of steps of one rank, one on each core, and all at once, and of messages among them.

    Numbers of ranks alternate, because cores are faster at one moment than at another.
    """
    cores, most = environment.usable_cores(), dist.get_world_size()
    groups = {number: dist.new_group(list(range(number))) for number in sorted({1, min(cores, most), most})}
    everyone = cast(dist.ProcessGroup, dist.group.WORLD)

    def crowds(allotment: Allotment) -> Measured:
        found = []
        for group in groups.values() if allotment.repetitions else ():
            if isinstance(group, dist.ProcessGroup):  # a number for ranks outside
                found.append(dataclasses.asdict(parts.crowd(group, cores, allotment.repetitions)))
            dist.barrier()
        counts = ("steps of several ranks at once", allotment.repetitions, 1 + CROWDED_STEPS)
        return Measured({"crowds": [found] if found else []}, (counts,))

    def messages(allotment: Allotment) -> Measured:
        with contextlib.closing(open_transport(timeout_s=config.timeout_s)) as transport:
            message_s = parts.around_message_s(everyone, transport, allotment.repetitions)
        return Measured({"among_steps_s": message_s}, (("messages among steps", allotment.repetitions, CROWDED_STEPS),))

    def waking(allotment: Allotment) -> Measured:
        later_s = []
        with contextlib.closing(open_transport(timeout_s=config.timeout_s)) as transport:
            for _ in range(allotment.repetitions):
                alone_s, beside_s = (parts.round_s(everyone, transport, computing=beside) for beside in (False, True))
                later_s.append(beside_s - alone_s)
        return Measured({"later_s": later_s}, (("rounds of messages", allotment.repetitions, WAKE_TURNS),))

    def at_once_s(number: int) -> float:
        return parts.step_s * max(1.0, number * config.threads / cores)

    *fewer, last = map(str, groups)
    round_s = sum(map(at_once_s, groups))
    return [
        *(
            Measurement(
                MeasuredPart(
                    text=f"steps of {', '.join(fewer)} and {last} ranks at once ({number} of {CROWD_ROUNDS})",
                    fixed_s=round_s,
                    full=1 + CROWDED_STEPS,
                    least=int(number == 1),
                ),
                crowds,
            )
            for number in range(1, 1 + CROWD_ROUNDS)
        ),
        Measurement(MeasuredPart(text="messages among steps", fixed_s=at_once_s(most), full=CROWDED_STEPS), messages),
        Measurement(
            MeasuredPart(
                text="messages while ranks compute",
                fixed_s=WAKE_S + (2 * parts.stir_s if parts.is_slow else at_once_s(most)),
                full=WAKE_TURNS,
                least=LEAST_WAKE_TURNS,
            ),
            waking,
        ),
    ]


def _by_rank_0(measure: Callable[[Allotment], Measured]) -> Callable[[Allotment], Measured]:
    return lambda allotment: measure(allotment) if dist.get_rank() == 0 else Measured({})


main = rank_main(CalibrateConfig, run, (BenchError,))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
