"""Dense gradients in 16 bits on the same links: what compression has to be faster than."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from bench.core import registry, spec
from bench.core.parts import Calibration
from bench.costs.prediction import Prediction, refusal
from bench.launch.predictions.asked import Asked
from bench.launch.predictions.checking import BASELINE, check_asked
from bench.launch.predictions.step import predicted
from collectives.base import Collective
from compressors.base import Compressor

MOST_TRIED = 64
"""ranks among which all collectives are tried; among more the one that a run would take by itself"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """The fastest way of them.

    Attributes:
        collective: that sums them.
    """

    collective: str
    prediction: Prediction

    @property
    def step_time_s(self) -> float:
        """Predicted."""
        return self.prediction.step_time_s


def dense_ways(calibration: Calibration, asked: Asked) -> list[Asked]:
    """How they may be summed, the one first that a run would take by itself.

    Raises:
        UsageError: they are not calibrated.
    """
    default = check_asked(calibration, dataclasses.replace(asked, compressor=BASELINE, collective=""))
    if not asked.waits or asked.world_size > MOST_TRIED:
        return [default]
    return [default, *pairs(asked, [BASELINE])]


def fastest(calibration: Calibration, ways: Sequence[Asked]) -> Dense:
    """The best of `dense_ways`, of equals the first."""
    each = [Dense(collective=way.collective, prediction=predicted(calibration, way)) for way in ways]
    return max(each, key=lambda dense: dense.prediction.samples_per_s)


def pairs(asked: Asked, compressors: Iterable[str]) -> Iterator[Asked]:
    """All that are legal among so many ranks, a hierarchy by hosts too; a backend's own sum is left to the ring."""
    names = [*registry.entries("collectives")]
    if 1 < asked.ranks_per_host < asked.world_size:
        by_host = spec.build("collectives", f"hierarchical:group_size={asked.ranks_per_host}")
        names.append(spec.short_text(by_host))
    for name in dict.fromkeys(names):
        collective = cast(Collective, spec.build("collectives", name))
        if name == "native" or refusal(collective) or collective.ranks_refusal(asked.world_size):
            continue
        for compressor in compressors:
            if cast(Compressor, spec.build("compressors", compressor)).refusal(collective) is None:
                yield dataclasses.replace(asked, compressor=compressor, collective=name)
