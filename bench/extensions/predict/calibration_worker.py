"""Worker of `bench calibrate`: each process runs `python -m bench.extensions.predict.calibration_worker FOLDER`.

The worker reads the folder's `config.json`, makes one measurement after another, and appends each result to
`progress.jsonl` at once. First two processes exchange messages, then rank 0 computes and encodes alone, and then all
ranks run steps at the same time. The measurements share a limited time in seconds.
"""

import contextlib
import dataclasses
import datetime
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist

from bench.core import environment, spec
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, append_json_line
from bench.extensions.predict.calibrating import denser_epochs
from bench.extensions.predict.calibration import LOCAL, MessageCosts
from bench.extensions.predict.message_costs import message_costs
from bench.extensions.predict.options import CalibrateConfig
from bench.extensions.predict.step_parts import CROWDED_STEPS, LEAST_TURNS, RANKS, StepParts, bucket_parts, encoded
from bench.rank.process import end_process, process_group, rank_main, set_up_device
from collectives.transport.sockets import open_transport

# The initial assumption that measurements take as long as expected has the weight of this many measured seconds.
PRIOR_S = 3.0


# The result of a measurement: a dict with fields of the calibration (or parts of a field) as plain values, by name, and
# a list with (name, number of repetitions made, number planned) for each kind of repetition.
Measured: TypeAlias = tuple[dict[str, Any], list[tuple[str, int, int]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredPart:
    """One measurement of a calibration, and the time that it is expected to take.

    Attributes:
        text: name of the measurement, shown to the user and written with its result.
        measure: makes the measurement, given the allowed number of repetitions and the allowed seconds. Only rank 0
            must call this function if `is_alone`, otherwise every rank must. None if the launcher makes the
            measurement.
        once_s: seconds that do not depend on the number of repetitions.
        fixed_s: seconds of one repetition.
        full, least: number of repetitions if there is enough time, and the smallest allowed number.
    """

    text: str
    measure: Callable[[int, float], Measured] | None = None
    is_alone: bool = False
    once_s: float = 0.0
    fixed_s: float = 0.0
    full: int = 1
    least: int = 1

    def takes_s(self, repetitions: float) -> float:
        """Return the expected seconds of the measurement with this number of repetitions."""
        return self.once_s + self.fixed_s * repetitions

    @property
    def extra_s(self) -> float:
        """Return the expected seconds of all repetitions beyond the smallest number of repetitions (`least`)."""
        return self.fixed_s * (self.full - self.least)


class Budget:
    """Divide a limited time among the measurements of a calibration.

    Each measurement gets its full number of repetitions if the time is enough. Otherwise, each gets the same number of
    seconds for repetitions above its smallest number, but a short measurement never gets more than it needs. So short
    measurements keep all their repetitions. Long measurements are repeated less often, because each already averages
    over more time. The expected times of the remaining measurements are corrected by the times of the finished ones,
    because all measurements take longer while other processes use the machine.

    Args:
        parts: the measurements in the order in which they are made.
        left_s: seconds for all measurements together.
        clock: returns the current time in seconds.
    """

    def __init__(
        self, parts: Sequence[MeasuredPart], left_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rest = list(parts)
        self._clock = clock
        self._ends = clock() + left_s
        self._expected_s, self._took_s = 0.0, 0.0

    def allot(self) -> tuple[int, float]:
        """Return the number of repetitions that the next measurement may make, and the seconds that it may take.

        The limit in seconds is for measurements that only find out while they run how long a repetition takes.
        """
        part, extra_s = self._rest[0], self._extra_s()
        if self._pace * part.extra_s <= extra_s:
            repetitions = part.full
        else:
            repetitions = part.least + int(extra_s / (self._pace * part.fixed_s))
        return repetitions, self._pace * part.takes_s(part.least) + extra_s

    @property
    def left_s(self) -> float:
        """Return the seconds that the remaining measurements are expected to take."""
        extra_s, pace = self._extra_s(), self._pace
        return sum(pace * part.takes_s(part.least) + min(extra_s, pace * part.extra_s) for part in self._rest)

    def made(self, repetitions: int, seconds: float) -> None:
        """Record the repetitions and seconds of the first remaining measurement, which is now finished."""
        self._expected_s += self._rest.pop(0).takes_s(repetitions)
        self._took_s += seconds

    def _extra_s(self) -> float:
        """Return the seconds that each measurement may take for repetitions above its smallest number."""
        slack_s = self._ends - self._clock() - self._pace * sum(part.takes_s(part.least) for part in self._rest)
        wanted = sorted(self._pace * part.extra_s for part in self._rest)
        for index, seconds in enumerate(wanted):
            if seconds > (equal_s := slack_s / (len(wanted) - index)):
                return max(0.0, equal_s)
            slack_s -= seconds
        return math.inf

    @property
    def _pace(self) -> float:
        """Return the seconds that finished measurements took / their expected seconds; close to 1 at the beginning."""
        return (self._took_s + PRIOR_S) / (self._expected_s + PRIOR_S)


LONG_MESSAGES = 40
CROWD_ROUNDS = 4
STEPS = "steps of one rank"
# Planned and smallest number of rounds of messages. The mean of all rounds is used, not the median: a round waits for
# the previous round, so long rounds also lengthen a step.
WAKE_TURNS, LEAST_WAKE_TURNS = 12, 2
# Expected seconds, assumed before anything is measured: for the messages between two processes, for encoding one
# element, for a round of short messages between computing ranks, and for a measurement by the launcher.
MESSAGES_S, ENCODE_S, WAKE_S, LATER_S = 3.0, 3e-9, 0.5, 20.0


def run(config: CalibrateConfig, folder: RunFolder) -> None:
    """Make all measurements that are not in `config.done`; every process of the job must call this function."""
    ends = time.monotonic() + config.left_s
    number = 1 + 1 + len(spec.split_list(config.compressors)) + CROWD_ROUNDS + 2
    with process_group(set_up_device(config.device, config.threads), config.timeout_s):
        measure = _Measurements(config, folder, number)
        messages = MeasuredPart(
            text="messages between two processes", measure=functools.partial(_messages, config), once_s=MESSAGES_S
        )
        measure([messages], [], ends)
        if len(set(config.done) - set(config.later)) >= number:
            return
        parts = StepParts(config)
        measure(
            [*_alone(config, parts), *_together(config, parts)],
            [MeasuredPart(text=text, once_s=LATER_S) for text in config.later],
            ends,
        )


class _Measurements:
    """Make measurements one after the other; rank 0 decides how often to repeat each of them, and reports the results.

    Args:
        config: the complete configuration.
        folder: the job's folder, to whose `progress.jsonl` rank 0 writes.
        number: number of measurements that these processes make.
    """

    def __init__(self, config: CalibrateConfig, folder: RunFolder, number: int) -> None:
        self._config, self._folder = config, folder
        # The other ranks wait while rank 0 measures all compressors, which may exceed the usual timeout.
        self._patient = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1)))
        self._number, self._of = 0, number + len(config.later)

    def __call__(self, parts: Sequence[MeasuredPart], later: Sequence[MeasuredPart], ends: float) -> None:
        """Make each measurement that was not made before, with as many repetitions as there is time for.

        Args:
            parts: the measurements in their order.
            later: the measurements that the launcher makes afterwards; empty if the remaining measurements are not
                known yet.
            ends: the time at which the time limit is reached.
        """
        is_rank_0 = dist.get_rank() == 0
        left = [part for part in (*parts, *later) if part.text not in self._config.done]
        budget = Budget(left, ends - time.monotonic())
        for part in parts:
            self._number += 1
            if part.measure is None or part.text in self._config.done:
                continue
            of_rank_0 = torch.tensor(budget.allot(), dtype=torch.float64)
            dist.broadcast(of_rank_0, 0, self._patient)
            repetitions, seconds = int(of_rank_0[0]), float(of_rank_0[1])
            if is_rank_0:
                left_s = budget.left_s if len(parts) > 1 else None  # unknown before the first measurement is made
                report = {"measuring": part.text, "number": self._number, "of": self._of, "left_s": left_s}
                append_json_line(self._folder.progress, report)
            started = time.monotonic()
            found, counts = part.measure(repetitions, seconds) if is_rank_0 or not part.is_alone else ({}, [])
            budget.made(repetitions, time.monotonic() - started)
            if is_rank_0:
                append_json_line(self._folder.progress, {"part": part.text, "found": found, "counts": counts})


def _messages(config: CalibrateConfig, _: int, __: float) -> Measured:
    costs = MessageCosts()
    group = dist.new_group([0, 1])
    if isinstance(group, dist.ProcessGroup):  # on ranks outside the group, `group` is a number
        with contextlib.closing(open_transport(group, timeout_s=config.timeout_s)) as transport:
            costs = message_costs(transport, LONG_MESSAGES)
    dist.barrier()
    return {"messages": {LOCAL: dataclasses.asdict(costs)}}, []


def _alone(config: CalibrateConfig, parts: StepParts) -> list[MeasuredPart]:
    """Return the measurements that rank 0 makes alone: of its compute, and of each compressor's work on its gradients.

    Steps are timed before and after each compressor, because the machine's speed varies over time.
    """
    texts = spec.split_list(config.compressors)
    steps_at_once = math.ceil(config.repeats / (1 + len(texts)))
    gradients = functools.cache(parts.gradients)

    def steps(repetitions: int, _: float) -> Measured:
        buckets = [dataclasses.asdict(bucket_parts(0.0, layers)) for layers, _ in gradients()[0]]
        times = parts.times(repetitions)
        return {"buckets": buckets, "times": times}, [(STEPS, len(times), RANKS + steps_at_once)]

    def encoding(text: str, repetitions: int, seconds: float) -> Measured:
        count = steps_at_once * repetitions // config.turns
        buckets, turns = encoded(text, gradients(), config, parts.stir, seconds - count * parts.step_s)
        times = parts.times(count)
        values = {"encoded": {text: [dataclasses.asdict(bucket) for bucket in buckets]}, "times": times}
        if denser_epochs(text):
            first, _ = encoded(text, gradients(), config, parts.stir, 0.0, in_first_epoch=True)
            values["first_epoch"] = {text: [dataclasses.asdict(bucket) for bucket in first]}
        return values, [(STEPS, len(times), steps_at_once), ("encodings", turns, config.turns)]

    step_s, encode_s = parts.step_s, ENCODE_S * parts.numel
    # A repetition encodes the gradients of every simulated rank, and calls `stir` before each bucket of rank 0. The
    # operations on messages that follow take about as long as encoding, and call `stir` twice per bucket.
    turn_s = 2 * RANKS * encode_s + 3 * parts.num_buckets * parts.stir_s + steps_at_once / config.turns * step_s
    return [
        MeasuredPart(
            text="one rank computing",
            measure=steps,
            is_alone=True,
            once_s=RANKS * step_s,
            fixed_s=step_s,
            full=steps_at_once,
            least=0,
        ),
        *(
            MeasuredPart(
                text=f"encoding by {text}",
                measure=functools.partial(encoding, text),
                is_alone=True,
                once_s=RANKS * encode_s + (1 + LEAST_TURNS) * turn_s * (denser_epochs(text) > 0),
                fixed_s=turn_s,
                full=config.turns,
                least=min(LEAST_TURNS, config.turns),
            )
            for text in texts
        ),
    ]


def _together(config: CalibrateConfig, parts: StepParts) -> list[MeasuredPart]:
    """Return the measurements that all ranks make together: steps of several ranks at once, and their messages.

    Steps are measured with one rank, with one rank per core, and with all ranks. These numbers of ranks alternate,
    because the machine's speed varies over time.
    """
    cores, most = environment.usable_cores(), dist.get_world_size()
    groups = {number: dist.new_group(list(range(number))) for number in sorted({1, min(cores, most), most})}
    everyone = cast(dist.ProcessGroup, dist.group.WORLD)

    def crowds(repetitions: int, _: float) -> Measured:
        found = []
        for group in groups.values() if repetitions else ():
            if isinstance(group, dist.ProcessGroup):  # on ranks outside the group, `group` is a number
                found.append(dataclasses.asdict(parts.crowd(group, cores, repetitions)))
            dist.barrier()
        counts = ("steps of several ranks at once", repetitions, 1 + CROWDED_STEPS)
        return {"crowds": [found] if found else []}, [counts]

    def messages(repetitions: int, _: float) -> Measured:
        with contextlib.closing(open_transport(timeout_s=config.timeout_s)) as transport:
            message_s = parts.around_message_s(everyone, transport, repetitions)
        return {"among_steps_s": message_s}, [("messages among steps", repetitions, CROWDED_STEPS)]

    def waking(repetitions: int, _: float) -> Measured:
        later_s = []
        with contextlib.closing(open_transport(timeout_s=config.timeout_s)) as transport:
            for _ in range(repetitions):
                alone_s, beside_s = (parts.round_s(everyone, transport, computing=beside) for beside in (False, True))
                later_s.append(beside_s - alone_s)
        return {"later_s": later_s}, [("rounds of messages", repetitions, WAKE_TURNS)]

    # Expected seconds of a step of each number of ranks at once.
    at_once_s = {number: parts.step_s * max(1.0, number * config.threads / cores) for number in groups}
    *fewer, last = map(str, groups)
    return [
        *(
            MeasuredPart(
                text=f"steps of {', '.join(fewer)} and {last} ranks at once ({number} of {CROWD_ROUNDS})",
                measure=crowds,
                fixed_s=sum(at_once_s.values()),
                full=1 + CROWDED_STEPS,
                least=int(number == 1),
            )
            for number in range(1, 1 + CROWD_ROUNDS)
        ),
        MeasuredPart(text="messages among steps", measure=messages, fixed_s=at_once_s[most], full=CROWDED_STEPS),
        MeasuredPart(
            text="messages while ranks compute",
            measure=waking,
            fixed_s=WAKE_S + (2 * parts.stir_s if parts.is_slow else at_once_s[most]),
            full=WAKE_TURNS,
            least=LEAST_WAKE_TURNS,
        ),
    ]


main = rank_main(CalibrateConfig, run, (BenchError,))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
