"""A job's ranks, and what they compute in a step; one of them may be slow on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from bench.core.config.syntax import Straggler
from bench.extensions.predict.arrays import Floats
from bench.extensions.predict.calibration import Calibration, EncodedBucket
from bench.extensions.predict.links.access import Links
from bench.extensions.predict.ranks.cores import SharedCores
from bench.extensions.predict.ranks.crowds import crowd_at, work_alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Ranks, and with what they make steps.

    Attributes:
        encoded: what the compressor makes of each bucket.
        links: of the ranks.
        slower: float [ranks], the factor on what each rank computes, for its host.
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
        computed_s: when backward has ended, likewise.
        factor: on other work of a rank, as it was measured for one that has the machine to itself.
        cpu_s: CPU time of any rank, the update included.
        longer: times what backward has taken by its end, that a rank then sleeps before it hands over the last bucket.
        cores: that all ranks share; None: hosts have their own.
        marks: work until each bucket is ready and until backward has ended, alone on the machine, float [buckets + 1].
        marks_of_last: the same for the last of ranks that begin at once: cores are not handed round evenly, so it comes
            to them later than all would together, and ends as they would, for the others leave it their cores.
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
        """As of `SharedCores`; the same whoever else computes, where hosts have their own."""
        return np.where(computes, 1 / self.factor, 0.0) if self.cores is None else self.cores.rates(computes)

    def reached(self, starts: Floats) -> Floats:
        """When ranks have each bucket ready, and then backward behind them, float [buckets + 1, ranks].

        On shared cores all have what the last of them has, as whoever sums with others waits for it.

        Args:
            starts: when each begins its step.
        """
        if self.cores is None:
            return starts + np.stack([*self.handed_over_s, self.computed_s])
        times = self.cores.reached(starts, self.marks_of_last)
        times[-2:] += self.longer * (times[-1] - starts)  # it computes faster while others still wait for it
        return times
