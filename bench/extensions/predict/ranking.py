"""Find the fastest pair of compressor and collective: on given links, over their rate, and over the number of ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import numpy as np

from bench.core import registry, spec
from bench.core.errors import UsageError
from bench.core.units import parse_rate
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.notes import outside
from bench.extensions.predict.prediction import Prediction, check_predictable
from bench.extensions.predict.request import BASELINE, PredictionRequest, check_request, check_waits
from bench.extensions.predict.step import predicted
from collectives.base import Collective
from collectives.options import incompatibility
from compressors.base import Compressor

# Most ranks among which all collectives are tried; among more only the one that a run would choose.
MOST_TRIED = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedPair:
    """One pair and its predicted step."""

    request: PredictionRequest
    prediction: Prediction

    @property
    def collective(self) -> str:
        """Return the collective that sums."""
        return self.request.collective

    @property
    def step_time_s(self) -> float:
        """Return the predicted seconds of a step."""
        return self.prediction.step_time_s


def on_each_collective(calibration: Calibration, request: PredictionRequest) -> list[PredictionRequest]:
    """Return a compressor on each collective that it can use, the one first that a run would choose.

    Where `request` names a collective, that is the only one.

    Raises:
        UsageError: as `check_request`.
    """
    default = check_request(calibration, request)
    if request.collective or not request.waits or request.world_size > MOST_TRIED:
        return [default]
    return [default, *(pair for pair in pairs(default, [default.compressor]) if pair != default)]


def dense_on_each_collective(calibration: Calibration, request: PredictionRequest) -> list[PredictionRequest]:
    """Return `on_each_collective` for dense gradients in 16 bits.

    Raises:
        UsageError: they are not calibrated.
    """
    return on_each_collective(calibration, dataclasses.replace(request, compressor=BASELINE, collective=""))


def fastest(calibration: Calibration, ways: Sequence[PredictionRequest]) -> PredictedPair:
    """Return the best of `on_each_collective`, the first of equals."""
    each = [PredictedPair(request=way, prediction=predicted(calibration, way)) for way in ways]
    return max(each, key=lambda way: way.prediction.samples_per_s)


def ranked(calibration: Calibration, request: PredictionRequest) -> tuple[list[PredictedPair], dict[str, str]]:
    """Return each calibrated compressor on its fastest collective, the fastest first, and why others are left out.

    Raises:
        UsageError: none is possible.
    """
    found, refused = [], {}
    for name in calibration.encoded:
        try:
            ways = on_each_collective(calibration, dataclasses.replace(request, compressor=name))
        except UsageError as reason:
            refused[name] = str(reason)
        else:
            found.append(fastest(calibration, ways))
    if not found:
        raise UsageError(next(iter(refused.values())))
    return sorted(found, key=lambda way: -way.prediction.samples_per_s), refused


def pairs(request: PredictionRequest, compressors: Iterable[str]) -> Iterator[PredictionRequest]:
    """Yield all legal pairs for this number of ranks, with a hierarchy of hosts; `ring` stands for `native`."""
    names = [*registry.entries("collectives")]
    if 1 < request.ranks_per_host < request.world_size:
        by_host = spec.build("collectives", f"hierarchical:group_size={request.ranks_per_host}")
        names.append(spec.short_text(by_host))
    for name in dict.fromkeys(names):
        collective = cast(Collective, spec.build("collectives", name))
        if (
            name == "native"
            or incompatibility(check_predictable, collective)
            or incompatibility(collective.check_ranks, request.world_size)
        ):
            continue
        for name_of_compressor in compressors:
            compressor = cast(Compressor, spec.build("compressors", name_of_compressor))
            if not incompatibility(compressor.check_compatible, collective):
                yield dataclasses.replace(request, compressor=name_of_compressor, collective=name)


POINTS_PER_DECADE = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Steps over the rate of all links.

    Attributes:
        rates_bps: ascending.
        pair: steps of what was asked for, on the collective that is fastest there unless one was named.
        dense: of dense gradients in 16 bits, on the collective that is fastest there.
        break_even_bps: rates at which both are equal, by interpolation.
    """

    rates_bps: list[float]
    pair: list[PredictedPair]
    dense: list[PredictedPair]
    break_even_bps: list[float]

    @property
    def pays(self) -> list[bool]:
        """Tell at which rates the pair is faster."""
        return [a.step_time_s < b.step_time_s for a, b in zip(self.pair, self.dense, strict=True)]


def sweep(calibration: Calibration, request: PredictionRequest, rates_bps: Sequence[float]) -> Curve:
    """Predict at every rate.

    Raises:
        UsageError: as `check_request`; or dense gradients in 16 bits are not calibrated, or ranks do not make their
            steps together.
    """
    check_waits(request)
    pair, dense = (
        [fastest(calibration, [way.at_rate(rate) for way in ways]) for rate in rates_bps]
        for ways in (on_each_collective(calibration, request), dense_on_each_collective(calibration, request))
    )
    ratios = np.log([a.step_time_s / b.step_time_s for a, b in zip(pair, dense, strict=True)])
    logs = np.log(rates_bps)
    crossings = np.flatnonzero((ratios[:-1] < 0) != (ratios[1:] < 0))
    at = [logs[i] + (logs[i + 1] - logs[i]) * ratios[i] / (ratios[i] - ratios[i + 1]) for i in crossings]
    return Curve(rates_bps=list(rates_bps), pair=pair, dense=dense, break_even_bps=np.exp(at).tolist())


def parse_sweep(text: str, per_decade: int = POINTS_PER_DECADE) -> list[float]:
    """Parse ``bandwidth=1mbit..10gbit``; return rates in bits per second, evenly on a logarithmic scale.

    Raises:
        UsageError: it is not of that form.
    """
    name, _, ends = text.partition("=")
    first, dots, last = ends.partition("..")
    if name.strip() != "bandwidth" or not dots:
        raise UsageError(f"--sweep '{text}' is not possible; write it like bandwidth=1mbit..10gbit")
    low, high = parse_rate(first.strip()), parse_rate(last.strip())
    if not low < high:
        raise UsageError(f"--sweep '{text}' does not ascend; write the slower rate first")
    points = max(2, round(per_decade * math.log10(high / low)) + 1)
    return [float(rate) for rate in np.geomspace(low, high, points)]


# Most ranks of a map, which needs hundreds of predictions.
MOST_RANKS = 1024


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
        """Return the speed-up over dense gradients."""
        return self.dense_step_time_s / self.step_time_s


def regimes(calibration: Calibration, jobs: Sequence[PredictionRequest], rates_bps: Sequence[float]) -> list[Regime]:
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
        tried = [*dense_on_each_collective(calibration, job)[:1], *pairs(job, calibration.encoded)]
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
    """Parse ``2..64``; return 2, 4, 8, .. 64; the last one is included whatever it is.

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
