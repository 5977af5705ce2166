"""Compressors on the collectives that they can use: which of these pairs is the fastest on given links."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from bench.core import registry, spec
from bench.core.errors import UsageError
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.checking import BASELINE, check_asked
from bench.extensions.predict.prediction import Prediction, check_predictable
from bench.extensions.predict.request import Asked
from bench.extensions.predict.step import predicted
from collectives.base import Collective
from collectives.options import incompatibility
from compressors.base import Compressor

MOST_TRIED = 64
"""ranks among which all collectives are tried; among more only the one that a run would choose"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One pair and its predicted step."""

    asked: Asked
    prediction: Prediction

    @property
    def collective(self) -> str:
        """Return the collective that sums."""
        return self.asked.collective

    @property
    def step_time_s(self) -> float:
        """Return the predicted seconds of a step."""
        return self.prediction.step_time_s


def ways_of(calibration: Calibration, asked: Asked) -> list[Asked]:
    """Return a compressor on each collective that it can use, the one first that a run would choose.

    Where `asked` names a collective, that is the only one.

    Raises:
        UsageError: as `check_asked`.
    """
    default = check_asked(calibration, asked)
    if asked.collective or not asked.waits or asked.world_size > MOST_TRIED:
        return [default]
    return [default, *(pair for pair in pairs(default, [default.compressor]) if pair != default)]


def dense_ways(calibration: Calibration, asked: Asked) -> list[Asked]:
    """Return `ways_of` for dense gradients in 16 bits.

    Raises:
        UsageError: they are not calibrated.
    """
    return ways_of(calibration, dataclasses.replace(asked, compressor=BASELINE, collective=""))


def fastest(calibration: Calibration, ways: Sequence[Asked]) -> Way:
    """Return the best of `ways_of`, the first of equals."""
    each = [Way(asked=way, prediction=predicted(calibration, way)) for way in ways]
    return max(each, key=lambda way: way.prediction.samples_per_s)


def ranked(calibration: Calibration, asked: Asked) -> tuple[list[Way], dict[str, str]]:
    """Return each calibrated compressor on its fastest collective, the fastest first, and why others are left out.

    Raises:
        UsageError: none is possible.
    """
    found, refused = [], {}
    for name in calibration.encoded:
        try:
            ways = ways_of(calibration, dataclasses.replace(asked, compressor=name))
        except UsageError as reason:
            refused[name] = str(reason)
        else:
            found.append(fastest(calibration, ways))
    if not found:
        raise UsageError(next(iter(refused.values())))
    return sorted(found, key=lambda way: -way.prediction.samples_per_s), refused


def pairs(asked: Asked, compressors: Iterable[str]) -> Iterator[Asked]:
    """Yield all legal pairs for this number of ranks, with a hierarchy of hosts; `ring` stands for `native`."""
    names = [*registry.entries("collectives")]
    if 1 < asked.ranks_per_host < asked.world_size:
        by_host = spec.build("collectives", f"hierarchical:group_size={asked.ranks_per_host}")
        names.append(spec.short_text(by_host))
    for name in dict.fromkeys(names):
        collective = cast(Collective, spec.build("collectives", name))
        if (
            name == "native"
            or incompatibility(check_predictable, collective)
            or incompatibility(collective.check_ranks, asked.world_size)
        ):
            continue
        for name_of_compressor in compressors:
            compressor = cast(Compressor, spec.build("compressors", name_of_compressor))
            if not incompatibility(compressor.check_compatible, collective):
                yield dataclasses.replace(asked, compressor=name_of_compressor, collective=name)
