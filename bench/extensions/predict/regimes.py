"""Which pair is fastest where: predictions over the rate of the links and the number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.core.errors import UsageError
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.checking import BASELINE, check_waits
from bench.extensions.predict.notes import outside
from bench.extensions.predict.request import Asked
from bench.extensions.predict.step import predicted
from bench.extensions.predict.ways import dense_ways, pairs

MOST_RANKS = 1024
"""of a map, which asks for hundreds of predictions"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regime:
    """The fastest pair at one rate among so many ranks, and dense gradients in 16 bits, on their fastest collective.

    Attributes:
        outside: why it is further than any prediction that was held against a measurement; None where it is not.
    """

    bandwidth_bps: float
    world_size: int
    compressor: str
    collective: str
    step_time_s: float
    dense_step_time_s: float
    outside: str | None

    @property
    def speedup(self) -> float:
        """Over dense gradients."""
        return self.dense_step_time_s / self.step_time_s


def regimes(calibration: Calibration, jobs: Sequence[Asked], rates_bps: Sequence[float]) -> list[Regime]:
    """Return the best of all calibrated compressors on all collectives, in every job and at every rate.

    Args:
        calibration: of the parts.
        jobs: ranks and links; their pairs do not matter.
        rates_bps: of all links.

    Raises:
        UsageError: dense gradients in 16 bits are not calibrated, or ranks do not make their steps together.
    """
    check_waits(jobs[0])
    found = []
    for job in jobs:
        tried = [*dense_ways(calibration, job)[:1], *pairs(job, calibration.encoded)]
        for rate in rates_bps:
            steps = [predicted(calibration, pair.at_rate(rate)).step_time_s for pair in tried]
            best = min(range(len(tried)), key=steps.__getitem__)  # of equals the first, which is dense
            dense_s = [seconds for pair, seconds in zip(tried, steps, strict=True) if pair.compressor == BASELINE]
            found.append(
                Regime(
                    bandwidth_bps=rate,
                    world_size=job.world_size,
                    compressor=tried[best].compressor,
                    collective=tried[best].collective,
                    step_time_s=steps[best],
                    dense_step_time_s=min(dense_s),
                    outside=outside(calibration, tried[best].at_rate(rate)),
                )
            )
    return found


def parse_world_sizes(text: str) -> list[int]:
    """``2..64`` -> 2, 4, 8, .. 64; the last one is among them whatever it is.

    Raises:
        UsageError: it is not of that form.
    """
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal()) or not 2 <= int(first) < int(last) <= MOST_RANKS:
        raise UsageError(f"world_size={text} is not possible; write it like world_size=2..64, at most {MOST_RANKS}")
    sizes = [int(first)]
    while 2 * sizes[-1] < int(last):
        sizes.append(2 * sizes[-1])
    return [*sizes, int(last)]
