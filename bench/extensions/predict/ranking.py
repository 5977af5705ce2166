"""Search for the fastest pair of compressor and collective: on given links, by link rate, and by number of ranks."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import numpy as np

from bench.core import registry, spec
from bench.core.errors import UsageError
from bench.core.units import parse_rate
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.request import BASELINE, PredictionRequest, check_predictable, check_request, predicted
from bench.extensions.predict.validation import outside
from collectives.base import Collective
from collectives.options import incompatibility
from compressors.base import Compressor

# Largest number of ranks for which all collectives are tried; with more, only the one that a run would choose.
MOST_TRIED = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedPair:
    """One pair and its predicted step."""

    request: PredictionRequest
    prediction: Prediction


def on_each_collective(calibration: Calibration, request: PredictionRequest) -> list[PredictionRequest]:
    """Return requests for the compressor on each collective that it can use; the default collective of a run is first.

    If `request` names a collective, only that one is used.

    Raises:
        UsageError: see `check_request`.
    """
    default = check_request(calibration, request)
    if request.collective or not request.waits or request.world_size > MOST_TRIED:
        return [default]
    return [default, *(pair for pair in pairs(default, [default.compressor]) if pair != default)]


def dense_on_each_collective(calibration: Calibration, request: PredictionRequest) -> list[PredictionRequest]:
    """Return `on_each_collective` for dense 16-bit gradients.

    Raises:
        UsageError: dense 16-bit gradients are not calibrated.
    """
    return on_each_collective(calibration, dataclasses.replace(request, compressor=BASELINE, collective=""))


def fastest(calibration: Calibration, ways: Sequence[PredictionRequest]) -> PredictedPair:
    """Return the fastest of the requests from `on_each_collective`; the first one if several are equally fast."""
    each = [PredictedPair(request=way, prediction=predicted(calibration, way)) for way in ways]
    return max(each, key=lambda way: way.prediction.samples_per_s)


def ranked(calibration: Calibration, request: PredictionRequest) -> tuple[list[PredictedPair], dict[str, str]]:
    """Return each calibrated compressor on its fastest collective, and the reasons why others are left out.

    The fastest compressor is first.

    Raises:
        UsageError: no compressor can be predicted.
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
    """Yield all possible pairs for this number of ranks, including a collective with a hierarchy of hosts.

    `native` is left out; `ring` represents it.
    """
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
    """Steps of a pair and of dense gradients at several link rates.

    Attributes:
        rates_bps: rates of all links in bits per second, ascending.
        pair: at each rate, the step of the requested compressor, on the named collective or on the fastest one.
        dense: at each rate, the step of dense 16-bit gradients on the fastest collective.
        break_even_bps: interpolated rates at which both steps take equally long.
    """

    rates_bps: list[float]
    pair: list[PredictedPair]
    dense: list[PredictedPair]
    break_even_bps: list[float]

    @property
    def pays(self) -> list[bool]:
        """Return for each rate whether the pair is faster than dense gradients."""
        both = zip(self.pair, self.dense, strict=True)
        return [pair.prediction.step_time_s < dense.prediction.step_time_s for pair, dense in both]


def sweep(calibration: Calibration, request: PredictionRequest, rates_bps: Sequence[float]) -> Curve:
    """Predict the steps of a compressor and of dense gradients at every rate.

    Raises:
        UsageError: see `check_request` and `PredictionRequest.at_rate`; or dense 16-bit gradients are not calibrated.
    """
    pair, dense = (
        [fastest(calibration, [way.at_rate(rate) for way in ways]) for rate in rates_bps]
        for ways in (on_each_collective(calibration, request), dense_on_each_collective(calibration, request))
    )
    times_s = ([each.prediction.step_time_s for each in ways] for ways in (pair, dense))
    ratios = np.log([of_pair / of_dense for of_pair, of_dense in zip(*times_s, strict=True)])
    logs = np.log(rates_bps)
    crossings = np.flatnonzero((ratios[:-1] < 0) != (ratios[1:] < 0))
    at = [logs[i] + (logs[i + 1] - logs[i]) * ratios[i] / (ratios[i] - ratios[i + 1]) for i in crossings]
    return Curve(rates_bps=list(rates_bps), pair=pair, dense=dense, break_even_bps=np.exp(at).tolist())


def parse_sweep(text: str, per_decade: int = POINTS_PER_DECADE) -> list[float]:
    """Parse ``bandwidth=1mbit..10gbit``; return rates in bits per second, evenly spaced on a logarithmic scale.

    Raises:
        UsageError: the text has another form.
    """
    name, _, ends = text.partition("=")
    first, dots, last = ends.partition("..")
    if name.strip() != "bandwidth" or not dots:
        raise UsageError(f"--sweep '{text}' is not possible; write it like bandwidth=1mbit..10gbit")
    low, high = parse_rate(first.strip()), parse_rate(last.strip())
    if not low < high:
        raise UsageError(f"--sweep '{text}' is not in ascending order; write the slower rate first")
    points = max(2, round(per_decade * math.log10(high / low)) + 1)
    return [float(rate) for rate in np.geomspace(low, high, points)]


# Largest number of ranks in a map, which needs hundreds of predictions.
MOST_RANKS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regime:
    """The fastest pair at one rate and number of ranks, compared with dense 16-bit gradients.

    Attributes:
        bandwidth_bps: the rate of all links in bits per second.
        dense_step_time_s: seconds of a step with dense 16-bit gradients on their fastest collective.
        outside: reason why the prediction is outside the validated range; None if it is inside.
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
    """Return the fastest pair of all calibrated compressors and all collectives, for every job and every rate.

    Args:
        calibration: the calibration from which steps are predicted.
        jobs: requests that give ranks and links; their pairs are ignored.
        rates_bps: rates of all links in bits per second.

    Raises:
        UsageError: see `PredictionRequest.at_rate`; or dense 16-bit gradients are not calibrated.
    """
    found = []
    for job in jobs:
        tried = [*dense_on_each_collective(calibration, job)[:1], *pairs(job, calibration.encoded)]
        for rate in rates_bps:
            times_s = {pair: predicted(calibration, pair.at_rate(rate)).step_time_s for pair in tried}
            best = min(times_s, key=times_s.__getitem__)  # the first of equals, which is dense
            found.append(
                Regime(
                    bandwidth_bps=rate,
                    world_size=job.world_size,
                    compressor=best.compressor,
                    collective=best.collective,
                    step_time_s=times_s[best],
                    dense_step_time_s=min(times_s[pair] for pair in tried if pair.compressor == BASELINE),
                    outside=outside(calibration, best.at_rate(rate)),
                )
            )
    return found


def parse_world_sizes(text: str) -> list[int]:
    """Parse ``2..64``; return 2, 4, 8, .. 64. The last number is always included.

    Raises:
        UsageError: the text has another form.
    """
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal()) or not 2 <= int(first) < int(last) <= MOST_RANKS:
        raise UsageError(f"world_size={text} is not possible; write it like world_size=2..64, at most {MOST_RANKS}")
    sizes = [int(first)]
    while 2 * sizes[-1] < int(last):
        sizes.append(2 * sizes[-1])
    return [*sizes, int(last)]
