"""CPU contention: what ranks compute in a step, and what those on the same cores take from each other.

While ranks compute whose shares of the time add up to a load, each gets share / slowdown(load) of what it would do by
itself; one that waits for messages takes nothing. With one share, and all beginning at once, that is `crowd_at`.

Source: processor sharing, Kleinrock, "Queueing systems", volume 2 (1976), section 4.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import simpy

from bench.core.config.syntax import Straggler
from bench.extensions.predict.calibration import Calibration, CpuContention, EncodedBucket
from bench.extensions.predict.links import Floats, Links

# Who is at work, bool [count] -> how much of it each gets done in a second, float [count]; 0 for the others.
Rates = Callable[[npt.NDArray[np.bool_]], Floats]


class FairShareQueue:
    """A queue of amounts that shrink at rates which change whenever one begins or ends.

    Args:
        env: whose clock counts.
        count: of those who share.
        rates: of all of them.
    """

    def __init__(self, env: simpy.Environment, count: int, rates: Rates) -> None:
        self._env, self._rates_of = env, rates
        self._busy = np.zeros(count, dtype=np.bool_)
        self._left, self._rates = np.zeros(count), np.zeros(count)
        self._ends = np.full(count, np.inf)
        self._done: list[simpy.Event | None] = [None] * count
        self._now = 0.0
        self._alarms = 0

    def begin(self, index: int, amount: float) -> simpy.Event:
        """Let one of them, which is not at work, begin; happens when so much is done."""
        assert not self._busy[index]
        done = self._done[index] = self._env.event()
        self._move_on()
        self._busy[index], self._left[index] = True, amount
        self._share()
        return done

    def rate_with(self, index: int) -> float:
        """Return the rate at which one of them works now, or would if it were at work."""
        busy = self._busy.copy()
        busy[index] = True
        return float(self._rates_of(busy)[index])

    def _move_on(self) -> None:
        self._left -= self._rates * (self._env.now - self._now)
        self._now = self._env.now

    def _share(self) -> None:
        """Find all rates anew, and wake up when the next one is done."""
        busy = self._busy
        self._rates = self._rates_of(busy)
        self._ends = np.full(len(busy), np.inf)
        self._ends[busy] = self._now + np.maximum(0.0, self._left[busy]) / self._rates[busy]
        self._alarms += 1
        if busy.any():
            alarm = self._env.timeout(max(0.0, float(self._ends.min()) - self._now), value=self._alarms)
            assert alarm.callbacks is not None  # only what has happened has none
            alarm.callbacks.append(lambda event: self._end(event.value))

    def _end(self, alarm: int) -> None:
        """End those that are done first, unless rates have changed since the alarm was set."""
        if alarm != self._alarms:
            return
        ended = np.flatnonzero(self._ends == self._ends.min())
        self._move_on()
        self._busy[ended] = False
        self._share()
        for index in ended.tolist():
            done, self._done[index] = self._done[index], None
            assert done is not None
            done.succeed()


def crowd_at(calibration: Calibration, load: float) -> CpuContention:
    """Return a step's times at any load, threads that compute / cores.

    At the least it takes the CPU time of a rank by itself, which other work on the machine did not lengthen. Between
    two loads that were measured times are interpolated. Beyond the last they grow as the turns do that threads have to
    take, of which there are none before every core has its thread; the CPU time of each stays.
    """
    loads = [crowd.load for crowd in calibration.crowds]
    times = np.array(
        [work_alone(calibration), *((*crowd.handed_over_s, crowd.computed_s) for crowd in calibration.crowds[1:])]
    )
    *handed_over, computed_s = (float(np.interp(load, loads, of_crowds)) for of_crowds in times.T)
    turns = max(1.0, load / max(1.0, loads[-1]))
    return CpuContention(
        load=load,
        handed_over_s=tuple(turns * at for at in handed_over),
        computed_s=turns * computed_s,
        cpu_s=float(np.interp(load, loads, [crowd.cpu_s for crowd in calibration.crowds])),
    )


def work_alone(calibration: Calibration) -> tuple[float, ...]:
    """Return a rank's CPU time by itself until each bucket is ready, and until backward has ended."""
    before_s = calibration.batch_s + calibration.forward_s
    return (*(before_s + bucket.ready_s for bucket in calibration.buckets), calibration.computed_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCores:
    """Cores, and the ranks on them.

    Attributes:
        calibration: says how ranks slow each other down.
        shares: of the time in which each rank's host runs, float [ranks].
        load: of one rank that always runs: its threads / cores.
    """

    calibration: Calibration
    shares: Floats
    load: float

    def reached(self, starts: Floats, marks: Floats) -> Floats:
        """Return when ranks come to marks of their work, float [marks, ranks].

        Args:
            starts: when each begins, float [ranks].
            marks: seconds of work until each, alone on the machine, ascending.
        """
        env, first = simpy.Environment(), float(starts.min())
        cores = FairShareQueue(env, len(starts), self.rates)
        times = np.empty((len(marks), len(starts)))

        def compute(rank: int) -> Generator[simpy.Event, Any, None]:
            yield env.timeout(starts[rank] - first)
            for number, seconds in enumerate(np.diff(marks, prepend=0.0)):
                yield cores.begin(rank, seconds)
                times[number, rank] = first + env.now

        for rank in range(len(starts)):
            env.process(compute(rank))
        env.run()
        return times

    def rates(self, computes: npt.NDArray[np.bool_]) -> Floats:
        """Return each rank's speed relative to having the cores to itself, float [ranks].

        Args:
            computes: who is at it, bool [ranks]; 0 for the others.
        """
        load = self.load * float(self.shares[computes].sum())
        slowdown = crowd_at(self.calibration, load).computed_s / self.calibration.computed_s
        rates: Floats = np.where(computes, self.shares, 0.0) / slowdown
        return rates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Ranks, their links and their work in a step.

    Attributes:
        encoded: what the compressor makes of each bucket.
        links: of the ranks.
        slower: float [ranks], the factor on what each rank computes, because of its host.
        load: threads that compute at once / cores, of those that share some.
        shared_cores: of all ranks together; None: hosts have their own.
        straggler: a rank that is slow on purpose.
    """

    encoded: Sequence[EncodedBucket]
    links: Links
    slower: Floats
    load: float
    shared_cores: int | None = None
    straggler: Straggler | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computing:
    """Seconds of a step's compute on every rank, float [ranks] where nothing else is said.

    Attributes:
        handed_over_s: when each bucket is ready, after the step began, where all begin at once; one array per bucket.
        computed_s: when backward has ended, after the step began, float [ranks].
        factor: on other work of a rank, as it was measured for one that has the machine to itself.
        cpu_s: CPU time of any rank, the update included.
        longer: times what backward has taken by its end, that a rank then sleeps before it hands over the last bucket.
        cores: that all ranks share; None: hosts have their own.
        marks: work until each bucket is ready and until backward has ended, alone on the machine, float [buckets + 1].
        marks_of_last: the same for the last of ranks that begin at once: cores are not handed round evenly, so it comes
            to them later than all would together, and ends as they would, because the others leave it their cores.
    """

    handed_over_s: tuple[Floats, ...]
    computed_s: Floats
    factor: Floats
    cpu_s: float
    longer: Floats
    cores: SharedCores | None
    marks: Floats
    marks_of_last: Floats

    @classmethod
    def of_ranks(cls, calibration: Calibration, job: Job) -> Self:
        """Put it together from what was measured of one rank, and of ranks among others.

        A straggler sleeps at the end of backward, before it hands over the last bucket, so that forward and backward
        take `slowdown` times as long; that is no CPU time.
        """
        slower, straggler = job.slower, job.straggler
        crowd = crowd_at(calibration, job.load)
        crowded = crowd.computed_s / calibration.computed_s
        longer = np.zeros(len(slower))
        if straggler is not None:
            longer[straggler.rank] = (straggler.slowdown - 1) * (1 - calibration.batch_s / calibration.computed_s)
        sleep_s = longer * crowd.computed_s
        *early, last = crowd.handed_over_s
        cores = None
        if job.shared_cores is not None:
            cores = SharedCores(calibration=calibration, shares=1 / slower, load=job.load / len(slower))
        return cls(
            handed_over_s=(*(slower * at for at in early), slower * (last + sleep_s)),
            computed_s=slower * (crowd.computed_s + sleep_s),
            factor=slower * crowded,
            cpu_s=crowd.cpu_s,
            longer=longer,
            cores=cores,
            marks=np.array(work_alone(calibration)),
            marks_of_last=np.array([*crowd.handed_over_s, crowd.computed_s]) / crowded,
        )

    def rates(self, computes: npt.NDArray[np.bool_]) -> Floats:
        """Return the rates of `SharedCores`, or constant ones if hosts have cores of their own."""
        return np.where(computes, 1 / self.factor, 0.0) if self.cores is None else self.cores.rates(computes)

    def reached(self, starts: Floats) -> Floats:
        """Return when ranks have each bucket ready, and when backward has ended, float [buckets + 1, ranks].

        On shared cores all have what the last of them has, as whoever sums with others waits for it.

        Args:
            starts: when each begins its step.
        """
        if self.cores is None:
            return starts + np.stack([*self.handed_over_s, self.computed_s])
        times = self.cores.reached(starts, self.marks_of_last)
        times[-2:] += self.longer * (times[-1] - starts)  # it computes faster while others still wait for it
        return times
