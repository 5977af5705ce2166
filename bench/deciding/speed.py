"""Compare predicted speeds of methods in the user's own script, from its profile, which holds times but no accuracy."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from bench.core import registry
from bench.core.errors import UsageError
from bench.core.waiting import waiting
from bench.launch.sweep_file import Settings
from bench.report.statistics import break_even

# Packages add a reader of profiles by an entry point of this group: a function that returns `PredictedSteps`. Its
# arguments are the file, the options of `bench decide` that the user gave, by name, and the options of each method, the
# baseline first.
SOURCES = "step_sources"
# Largest error of predicted step times in the check that `docs/predict.md` reports. Smaller differences between methods
# give no answer.
ERROR = 0.10
HIGHEST_BPS, RATES = 100e9, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedMethod:
    """The predicted duration of a training step with one method.

    Attributes:
        compressor, collective: the method; the collective is the fastest one if the user named none.
        step_time_s: seconds of a step on the link.
        payload_bytes_per_step: bytes that a rank sends in a step.
        first_epoch_step_time_s, first_epoch_payload_bytes_per_step: the same in the first epoch; None if a step then is
            like all later ones.
        at_rate: returns the seconds of a step if all links had the given rate in bits per second.
    """

    compressor: str
    collective: str
    step_time_s: float
    payload_bytes_per_step: float
    first_epoch_step_time_s: float | None
    first_epoch_payload_bytes_per_step: float | None
    at_rate: Callable[[float], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedSteps:
    """The predicted durations of a training step with each method on one link.

    Attributes:
        title: the model and the link.
        as_it_is_s: seconds of a step of the user's unchanged script.
        methods: the methods, the baseline first.
        rate_bps: the rate of the link in bits per second; None if the link has no rate, or if its directions or hosts
            have different rates.
        notes: sentences for the user about the limits of the predictions.
    """

    title: str
    as_it_is_s: float
    methods: list[PredictedMethod]
    rate_bps: float | None
    notes: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """The predicted step time of one method, compared with the step time of the baseline.

    Attributes:
        compressor, collective, step_time_s, payload_bytes_per_step, first_epoch_step_time_s,
            first_epoch_payload_bytes_per_step: as in `PredictedMethod`.
        factor: seconds of the baseline's step / `step_time_s`.
        verdict: "faster" or "slower" if the difference is larger than the error of predictions, otherwise "open".
        faster_up_to_bps: the highest rate in bits per second, the same for all links, at which the verdict is "faster";
            None if there is no such rate, or if the links do not all have the same rate.
    """

    compressor: str
    collective: str
    step_time_s: float
    payload_bytes_per_step: float
    first_epoch_step_time_s: float | None
    first_epoch_payload_bytes_per_step: float | None
    factor: float
    verdict: str
    faster_up_to_bps: float | None


def read_profile(path: Path, given: dict[str, Any], methods: Sequence[Settings]) -> PredictedSteps:
    """Return the predicted step times of methods in the user's script, from a profile of this script.

    Args:
        path: the profile.
        given: the options of `bench decide` that the user gave, by name.
        methods: the options of each method, the baseline first.

    Raises:
        UsageError: the file is not a profile, a method or link cannot be predicted, or no installed package reads
            profiles.
    """
    if "profile" not in registry.plugins(SOURCES):
        raise UsageError(
            "--from-profile needs the extension bench.extensions.predict, which is missing here; install gradwire "
            "again to get it"
        )
    read = cast(Callable[..., PredictedSteps], registry.load_plugin(SOURCES, "profile"))
    return read(path, given, methods)


def speeds(predicted: PredictedSteps) -> list[Speed]:
    """Return the predicted step time of each method, compared with the first method, which is the baseline."""
    baseline = predicted.methods[0]
    baseline_at = functools.cache(baseline.at_rate)

    def compared(method: PredictedMethod) -> Speed:
        factor, edge = baseline.step_time_s / method.step_time_s, None
        if predicted.rate_bps is not None and method is not baseline:
            waiting.doing(f"finding the rate up to which {method.compressor} is faster")
            edge = faster_up_to(lambda rate: baseline_at(rate) / method.at_rate(rate), predicted.rate_bps)
        return Speed(
            **{
                field.name: getattr(method, field.name)
                for field in dataclasses.fields(method)
                if field.name != "at_rate"
            },
            factor=factor,
            verdict="faster" if factor > 1 + ERROR else "slower" if factor < 1 / (1 + ERROR) else "open",
            faster_up_to_bps=edge,
        )

    return [compared(method) for method in predicted.methods]


def faster_up_to(factor: Callable[[float], float], from_bps: float) -> float | None:
    """Return the highest rate in bits per second, up to `HIGHEST_BPS`, at which a factor exceeds 1 + `ERROR`.

    Return None if there is no such rate.

    Args:
        factor: called with a rate in bits per second that all links have; returns the seconds of the baseline's step /
            the seconds of the method's step.
        from_bps: the lowest rate to try.
    """
    lowest = min(from_bps, HIGHEST_BPS / 10)
    rates = [min(HIGHEST_BPS, lowest * (HIGHEST_BPS / lowest) ** (number / (RATES - 1))) for number in range(RATES)]
    points = ((rate, factor(rate) / (1 + ERROR)) for rate in reversed(rates))
    above = next(points)
    if above[1] > 1.0:
        return HIGHEST_BPS
    for point in points:  # from the highest rate down, because a factor takes long to compute
        if edges := break_even([point, above]):
            return max(edges)
        above = point
    return None
