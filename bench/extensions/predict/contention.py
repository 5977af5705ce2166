"""Contention: how ranks on the same cores slow each other down, and how messages share links to a server.

A rank's share is the fraction of the time, 0 to 1, in which its host may run. The speed of a rank that computes is
share / slowdown(load) times its speed alone on the machine. The load (computing threads / cores) is the load of one
rank times the sum of the shares of all ranks that compute at that moment; a rank that waits for messages adds nothing.
If all ranks have the same share and begin at once, `crowd_at` gives their times.

Messages to and from a server share links max-min fairly: no message can get a higher rate unless a message that is no
faster gets a lower rate. The ranks of a host share its link in equal parts, and the part of the server's link that a
host cannot use is left to the other hosts.

Sources: processor sharing, Kleinrock, "Queueing systems", volume 2 (1976), section 4.4; max-min fair rates by
progressive filling, Bertsekas and Gallager, "Data networks" (2nd edition, 1992), section 6.5.2.
"""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import simpy

from bench.core.config.syntax import Straggler
from bench.extensions.predict.calibration import Calibration, CpuContention, EncodedBucket
from bench.extensions.predict.links import Floats, Links
from collectives.schedule.waves import Ints

# A function: which workers are busy, bool [count] -> the work that each does per second, float [count]; 0 if not busy.
Rates = Callable[[npt.NDArray[np.bool_]], Floats]


class FairShareQueue:
    """Simulate workers that share a resource, so that their rates change whenever one of them begins or ends its work.

    Args:
        env: the simulation, whose clock is used.
        count: number of workers.
        rates: returns the rates of all workers in units of work per second, float [count]; the function's argument says
            which workers are busy, bool [count].
    """

    def __init__(self, env: simpy.Environment, count: int, rates: Rates) -> None:
        self._env, self._rates_of = env, rates
        self._busy = np.zeros(count, dtype=np.bool_)
        self._left, self._rates = np.zeros(count), np.zeros(count)
        self._ends = np.full(count, np.inf)
        self._done: dict[int, simpy.Event] = {}
        self._now = 0.0
        self._alarms = 0

    def begin(self, index: int, amount: float) -> simpy.Event:
        """Give worker `index`, which is not busy, some work; return an event that happens when the work is done."""
        done = self._done[index] = self._env.event()
        self._left -= self._rates * (self._env.now - self._now)
        self._busy[index], self._left[index] = True, amount
        self._share()
        return done

    def rate_with(self, index: int) -> float:
        """Return the current rate of worker `index`; if it is idle, the rate that it would get if it began work now."""
        busy = self._busy.copy()
        busy[index] = True
        return float(self._rates_of(busy)[index])

    def _share(self) -> None:
        """Update all rates after a worker began or ended its work, and schedule a wake-up for the next end."""
        self._now = self._env.now
        busy, self._rates = self._busy, self._rates_of(self._busy)
        self._ends = np.full(len(busy), np.inf)
        self._ends[busy] = self._now + np.maximum(0.0, self._left[busy]) / self._rates[busy]
        self._alarms += 1
        if busy.any():
            alarm = self._env.timeout(max(0.0, float(self._ends.min()) - self._now), value=self._alarms)
            assert alarm.callbacks is not None  # None only after the event has happened
            alarm.callbacks.append(lambda event: self._end(event.value))

    def _end(self, alarm: int) -> None:
        """End all work that is due now; do nothing if rates have changed since the wake-up `alarm` was scheduled."""
        if alarm != self._alarms:
            return
        ended = np.flatnonzero(self._ends == self._ends.min())
        self._left -= self._rates * (self._env.now - self._now)
        self._busy[ended] = False
        self._share()
        for index in ended.tolist():
            self._done.pop(index).succeed()


# Bytes per second of a link without a limit: so fast that transfers take practically no time.
FASTEST = 1e15


class Star:
    """Simulate messages between the ranks and the server, which is one of the ranks.

    Args:
        env: the simulation, whose clock is used.
        links: the links between the ranks.
        root: the rank that is the server; all messages are sent from it or to it.
    """

    def __init__(self, env: simpy.Environment, links: Links, root: int) -> None:
        n = links.num_ranks
        self._env, self._links, self._root = env, links, root
        self._up, self._down = (np.minimum(rates, FASTEST) for rates in (links.up_rate, links.down_rate))
        self._queues = [simpy.Resource(env) for _ in range(2 * n)]
        self._wires = FairShareQueue(env, 2 * n, self._fair_rates)

    def send(self, rank: int, nbytes: float, *, to_server: bool) -> simpy.Event:
        """Send bytes from a rank to the server, or from the server to the rank.

        The message waits for earlier messages between this rank and the server in the same direction.

        Returns:
            An event that happens when the last byte is sent; it happens at once if the rank is on the server's host.
        """
        if self._links.host_of[rank] == self._links.host_of[self._root]:
            return self._env.event().succeed()
        return self._env.process(self._carry(rank if to_server else self._links.num_ranks + rank, nbytes))

    def latency_s(self, rank: int, *, to_server: bool) -> float:
        """Return the one-way delay in seconds of messages between a rank and the server; 0 within a host."""
        host, server = self._links.host_of[[rank, self._root]]
        return 0.0 if host == server else float(self._links.latency_s[host if to_server else server])

    def _carry(self, queue: int, nbytes: float) -> Generator[simpy.Event, Any, None]:
        with self._queues[queue].request() as request:
            yield request
            yield self._wires.begin(queue, nbytes)

    def _fair_rates(self, busy: npt.NDArray[np.bool_]) -> Floats:
        """Return the bytes per second of each rank's messages to and from the server, float [2 * ranks].

        The rate is 0 for messages that are not under way (not `busy`).
        """
        hosts, share = self._links.host_of, self._links.ack_share
        server_up, server_down = self._up[hosts[self._root]], self._down[hosts[self._root]]
        to_server, from_server = (
            np.bincount(hosts[side], minlength=len(self._up)) for side in (busy[: len(hosts)], busy[len(hosts) :])
        )
        up = fair_shares(to_server, self._up, server_down)
        down = fair_shares(from_server, self._down, server_up)
        if share and to_server.any() and from_server.any():
            acked_up, acked_down = share * up * to_server, share * down * from_server
            # Acknowledgements leave at least half of a rate to messages, because both share links fairly.
            left_up = np.maximum(self._up - acked_down, self._up / 2)
            left_down = np.maximum(self._down - acked_up, self._down / 2)
            up = fair_shares(to_server, left_up, max(server_down - acked_down.sum(), server_down / 2))
            down = fair_shares(from_server, left_down, max(server_up - acked_up.sum(), server_up / 2))
        return np.where(busy, np.concatenate([up[hosts], down[hosts]]), 0.0)


def fair_shares(count: Ints, own: Floats, shared: float) -> Floats:
    """Return the rate per flow (message under way) on each host, float [hosts], if all flows share one more link.

    Rates are max-min fair, and in the unit of `own` and `shared`.

    Args:
        count: number of flows of each host, int [hosts].
        own: rate of each host's own link, float [hosts].
        shared: rate of the link that all flows share.
    """
    rates = np.zeros(len(count))
    used = np.flatnonzero(count)
    if not len(used):
        return rates
    full_at = own[used] / count[used]  # the rate per flow at which a host's own link is full
    order = np.argsort(full_at)
    own, count, full_at = own[used[order]], count[used[order]], full_at[order]
    taken = own.cumsum() - own
    level = (shared - taken) / count[::-1].cumsum()[::-1]
    ends = np.flatnonzero(level <= full_at)
    rates[used[order]] = np.minimum(full_at, level[ends[0]] if len(ends) else np.inf)
    return rates


def crowd_at(calibration: Calibration, load: float) -> CpuContention:
    """Return the times of forward and backward at a load (computing threads / cores), from the measured times.

    Up to the smallest measured load, the times are the CPU time of a rank alone, which other work on the machine did
    not lengthen. Between two measured loads, times are interpolated. Beyond the largest measured load, times grow in
    proportion to the load once there are more threads than cores, because the cores then switch between threads; the
    CPU time stays as at the largest measured load.
    """
    loads = [crowd.load for crowd in calibration.crowds]
    times = np.array(
        [work_alone(calibration), *((*crowd.handed_over_s, crowd.computed_s) for crowd in calibration.crowds[1:])]
    )
    *handed_over, computed_s = (float(np.interp(load, loads, of_crowds)) for of_crowds in times.T)
    factor = max(1.0, load / max(1.0, loads[-1]))
    return CpuContention(
        load=load,
        handed_over_s=tuple(factor * at for at in handed_over),
        computed_s=factor * computed_s,
        cpu_s=float(np.interp(load, loads, [crowd.cpu_s for crowd in calibration.crowds])),
    )


def work_alone(calibration: Calibration) -> tuple[float, ...]:
    """Return the CPU seconds of a rank alone on the machine until each bucket is ready and until backward has ended."""
    before_s = calibration.batch_s + calibration.forward_s
    return (*(before_s + bucket.ready_s for bucket in calibration.buckets), calibration.computed_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCores:
    """CPU cores, and the ranks that compute on them together.

    Attributes:
        calibration: the calibration, which tells how much ranks slow each other down.
        shares: fraction of the time in which each rank's host may run, 0 to 1, float [ranks].
        load: the load of one rank that always runs: threads of the rank / cores.
    """

    calibration: Calibration
    shares: Floats
    load: float

    def reached(self, starts: Floats, marks: Floats) -> Floats:
        """Return the times in seconds at which each rank has done given amounts of work, float [marks, ranks].

        Args:
            starts: the time at which each rank begins, float [ranks].
            marks: the amounts, in seconds that a rank alone on the machine takes for them, ascending, float [marks].
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
        """Return each rank's speed / the speed of a rank alone on the machine, float [ranks]; 0 if it does not compute.

        Args:
            computes: which ranks compute, bool [ranks].
        """
        crowd = crowd_at(self.calibration, self.load * float(self.shares[computes].sum()))
        slowdown = crowd.computed_s / self.calibration.computed_s
        return np.where(computes, self.shares / slowdown, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The job whose step is predicted: its ranks, their links and their work.

    Attributes:
        encoded: for each bucket of gradients, the compressor's messages and its work.
        links: the links between the ranks.
        slower: factor by which each rank computes more slowly because of its host, float [ranks].
        load: threads that compute at once / cores, for ranks that share cores.
        shared_cores: number of cores that all ranks share; None if hosts have their own.
        straggler: a rank that is slowed down on purpose; None if there is none.
    """

    encoded: Sequence[EncodedBucket]
    links: Links
    slower: Floats
    load: float
    shared_cores: int | None = None
    straggler: Straggler | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computing:
    """Times of a step's forward and backward on every rank.

    Attributes:
        handed_over_s: seconds from the start of the step until each bucket is ready, if all ranks begin at once; one
            float [ranks] per bucket.
        computed_s: seconds from the start of the step until backward has ended, float [ranks].
        factor: factor by which a rank's work outside forward and backward takes longer than measured alone on the
            machine, float [ranks].
        cpu_s: CPU seconds of one rank in a step, with the update.
        longer: time that a straggler sleeps at the end of backward, before it hands over the last bucket, as a multiple
            of the time since the step began, float [ranks]; 0 for other ranks.
        cores: the cores that all ranks share; None if hosts have their own.
        marks: seconds of work until each bucket is ready and until backward has ended, for a rank alone on the machine,
            float [buckets + 1].
        marks_of_last: `marks` for the slowest of several ranks that begin at once. Because cores are not shared evenly,
            each bucket of this rank is ready later than with even sharing. Its backward still ends at the same time as
            with even sharing, because the other ranks end earlier and free their cores.
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
        """Compute the times from measurements of one rank alone and of several ranks on the same cores.

        A straggler sleeps at the end of backward, before it hands over the last bucket, so that forward and backward
        take `slowdown` times as long. The sleep takes no CPU time.
        """
        slower, crowd = job.slower, crowd_at(calibration, job.load)
        crowded = crowd.computed_s / calibration.computed_s
        longer = np.zeros(len(slower))
        if job.straggler is not None:
            longer[job.straggler.rank] = (job.straggler.slowdown - 1) * (
                1 - calibration.batch_s / calibration.computed_s
            )
        sleep_s = longer * crowd.computed_s
        *early, last = crowd.handed_over_s
        cores = SharedCores(calibration=calibration, shares=1 / slower, load=job.load / len(slower))
        return cls(
            handed_over_s=(*(slower * at for at in early), slower * (last + sleep_s)),
            computed_s=slower * (crowd.computed_s + sleep_s),
            factor=slower * crowded,
            cpu_s=crowd.cpu_s,
            longer=longer,
            cores=None if job.shared_cores is None else cores,
            marks=np.array(work_alone(calibration)),
            marks_of_last=np.array([*crowd.handed_over_s, crowd.computed_s]) / crowded,
        )

    def rates(self, computes: npt.NDArray[np.bool_]) -> Floats:
        """Return each rank's speed / the speed of a rank alone on the machine, float [ranks]; 0 if it does not compute.

        The speed is constant if hosts have their own cores.

        Args:
            computes: which ranks compute, bool [ranks].
        """
        return np.where(computes, 1 / self.factor, 0.0) if self.cores is None else self.cores.rates(computes)

    def reached(self, starts: Floats) -> Floats:
        """Return the times at which each bucket is ready and backward has ended, float [buckets + 1, ranks].

        On shared cores, the times of the slowest rank are used for all ranks, because sums wait for that rank.

        Args:
            starts: the time at which each rank begins its step, float [ranks].
        """
        if self.cores is None:
            return starts + np.stack([*self.handed_over_s, self.computed_s])
        times = self.cores.reached(starts, self.marks_of_last)
        # A straggler computes faster while the other ranks already wait for it.
        times[-2:] += self.longer * (times[-1] - starts)
        return times
