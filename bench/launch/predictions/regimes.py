"""Which pair is fastest where: predictions over the rate of the links and the number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

from bench.core import registry, spec
from bench.core.errors import UsageError
from bench.core.parts import Calibration
from bench.costs.prediction import refusal
from bench.launch.predictions.asked import Asked
from bench.launch.predictions.checking import BASELINE, baseline
from bench.launch.predictions.notes import outside
from bench.launch.predictions.step import predicted
from collectives.base import Collective
from compressors.base import Compressor

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


def regimes(
    calibration: Calibration, asked: Asked, rates_bps: Sequence[float], world_sizes: Sequence[int]
) -> list[Regime]:
    """The best of all calibrated compressors on all collectives, at every rate and number of ranks.

    Args:
        calibration: of the parts.
        asked: the link of its first host is that of all; its pair does not matter.
        rates_bps: of all links.
        world_sizes: one rank on each host.

    Raises:
        UsageError: dense gradients in 16 bits are not calibrated.
    """
    found = []
    for world_size in world_sizes:
        hosts = dataclasses.replace(asked, hosts=asked.hosts[:1] * world_size)
        dense = baseline(hosts, calibration)
        pairs = [dense, *_pairs(calibration, hosts)]
        for rate in rates_bps:
            steps = [predicted(calibration, pair.at_rate(rate)).step_time_s for pair in pairs]
            best = min(range(len(pairs)), key=steps.__getitem__)  # of equals the first, which is dense
            dense_s = [seconds for pair, seconds in zip(pairs, steps, strict=True) if pair.compressor == BASELINE]
            found.append(
                Regime(
                    bandwidth_bps=rate,
                    world_size=world_size,
                    compressor=pairs[best].compressor,
                    collective=pairs[best].collective,
                    step_time_s=steps[best],
                    dense_step_time_s=min(dense_s),
                    outside=outside(calibration, pairs[best].at_rate(rate)),
                )
            )
    return found


def parse_world_sizes(text: str) -> list[int]:
    """``2..64`` -> 2, 4, 8, .. 64.

    Raises:
        UsageError: it is not of that form.
    """
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal()) or not 2 <= int(first) < int(last) <= MOST_RANKS:
        raise UsageError(f"world_size={text} is not possible; write it like world_size=2..64, at most {MOST_RANKS}")
    sizes = [int(first)]
    while 2 * sizes[-1] <= int(last):
        sizes.append(2 * sizes[-1])
    return sizes


def _pairs(calibration: Calibration, asked: Asked) -> Iterator[Asked]:
    """All that are legal among so many ranks; a backend's own sum is predicted as a ring, and left to that."""
    for name in registry.entries("collectives"):
        collective = cast(Collective, spec.build("collectives", name))
        if name == "native" or refusal(collective) or collective.ranks_refusal(asked.world_size):
            continue
        for compressor in calibration.encoded:
            if cast(Compressor, spec.build("compressors", compressor)).refusal(collective) is None:
                yield dataclasses.replace(asked, compressor=compressor, collective=name)
