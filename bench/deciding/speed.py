"""Answers about speed alone, predicted from a profile of the user's own script, which holds no accuracy."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from bench.core import registry
from bench.core.errors import UsageError
from bench.launch.sweep_file import Settings
from bench.report.statistics import break_even

# Packages add what reads a profile by an entry point of this group: a function that returns `PredictedSteps` for a
# file, the options of `bench decide` that the user gave, by name, and the options of each method, the baseline first.
SOURCES = "step_sources"
# Largest error of predicted step times in the check that `docs/predict.md` reports: smaller differences are no answer.
ERROR = 0.10
HIGHEST_BPS, RATES = 100e9, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedMethod:
    """The predicted step of one method.

    Attributes:
        compressor, collective: the method; the fastest collective if the user named none.
        step_time_s: seconds of a step on the link.
        at_rate: returns the seconds of a step if all links had this rate in bits per second.
    """

    compressor: str
    collective: str
    step_time_s: float
    at_rate: Callable[[float], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedSteps:
    """The predicted steps of all methods on one link.

    Attributes:
        title: the model and the link.
        as_it_is_s: seconds of a step of the script as it is.
        methods: the methods, the baseline first.
        rate_bps: the rate of the link in bits per second; None if its directions or hosts differ, or it has no rate.
        notes: sentences that limit what the predictions say.
    """

    title: str
    as_it_is_s: float
    methods: list[PredictedMethod]
    rate_bps: float | None
    notes: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """The predicted step of one method, compared with that of the baseline.

    Attributes:
        compressor, collective, step_time_s: as in `PredictedMethod`.
        factor: seconds of the baseline's step / `step_time_s`.
        verdict: "faster" or "slower" if the factor is larger than the error of predictions, otherwise "open".
        faster_up_to_bps: the highest rate of all links, in bits per second, at which the verdict is "faster"; None if
            it never is, or if the links are not described by one rate.
    """

    compressor: str
    collective: str
    step_time_s: float
    factor: float
    verdict: str
    faster_up_to_bps: float | None


def read_profile(path: Path, given: dict[str, Any], methods: Sequence[Settings]) -> PredictedSteps:
    """Return the predicted steps of methods in the script that a file profiles.

    Args:
        path: the profile.
        given: the options of `bench decide` that the user gave, by name.
        methods: the options of each method, the baseline first.

    Raises:
        UsageError: the file is not a profile, a method or link cannot be predicted, or no package can do so.
    """
    if "profile" not in registry.plugins(SOURCES):
        raise UsageError(
            "--from-profile needs the extension bench.extensions.predict, which is missing here; install gradwire "
            "again to get it"
        )
    read = cast(Callable[..., PredictedSteps], registry.load_plugin(SOURCES, "profile"))
    return read(path, given, methods)


def speeds(predicted: PredictedSteps) -> list[Speed]:
    """Return the step of each method, compared with the first."""
    baseline = predicted.methods[0]

    def compared(method: PredictedMethod) -> Speed:
        factor, edge = baseline.step_time_s / method.step_time_s, None
        if predicted.rate_bps is not None and method is not baseline:
            edge = faster_up_to(lambda rate: baseline.at_rate(rate) / method.at_rate(rate), predicted.rate_bps)
        return Speed(
            compressor=method.compressor,
            collective=method.collective,
            step_time_s=method.step_time_s,
            factor=factor,
            verdict="faster" if factor > 1 + ERROR else "slower" if factor < 1 / (1 + ERROR) else "open",
            faster_up_to_bps=edge,
        )

    return [compared(method) for method in predicted.methods]


def faster_up_to(factor: Callable[[float], float], from_bps: float) -> float | None:
    """Return the highest rate in bits per second, up to `HIGHEST_BPS`, at which a factor exceeds 1 + `ERROR`, or None.

    Args:
        factor: seconds of the baseline's step / seconds of the method's step, at a rate of all links.
        from_bps: the lowest rate to try.
    """
    lowest = min(from_bps, HIGHEST_BPS / 10)
    rates = [lowest * (HIGHEST_BPS / lowest) ** (number / (RATES - 1)) for number in range(RATES)]
    points = [(rate, factor(rate) / (1 + ERROR)) for rate in rates]
    return HIGHEST_BPS if points[-1][1] > 1.0 else max(break_even(points), default=None)
