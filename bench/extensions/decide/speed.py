"""Answers about speed alone, predicted from a profile of the user's own script, which holds no accuracy."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.cli.console import plain_table, print_json, stdout_console
from bench.core.errors import UsageError
from bench.core.units import format_rate, format_seconds
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.ranking import fastest, heading, on_each_collective, step_as_it_is
from bench.extensions.predict.request import PredictionRequest, request_from_options
from bench.extensions.predict.script_profile import Profile
from bench.extensions.predict.validation import notes
from bench.launch.sweep_file import Settings

# Largest error of predicted step times in the check that `docs/predict.md` reports: smaller differences are no answer.
ERROR = 0.10
HIGHEST_BPS, RATES = 100e9, 40
ACCURACY = (
    "Accuracy was not measured, because a profile holds times only; to measure it, train your script once with "
    '`attach(model, "{compressor}", "{collective}", optimizer=optimizer)` and once without, and compare'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """The predicted step of one method on the link.

    Attributes:
        compressor, collective: the method; the fastest collective if the user named none.
        step_time_s: seconds of a step.
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


def link_options(given: dict[str, Any]) -> PredictConfig:
    """Return the options that describe the ranks and links.

    Args:
        given: the options of `bench decide` that the user gave, by name.

    Raises:
        UsageError: an option has no meaning for a prediction from a profile.
    """
    possible = {option.name for option in PredictConfig.options()} - {"strategy", "model", "dataset", "batch_size"}
    if others := sorted(given.keys() - possible):
        raise UsageError(
            f"--from-profile predicts the steps of your own script; leave out --{others[0].replace('_', '-')}"
        )
    return PredictConfig(**given)


def print_speeds(path: Path, given: dict[str, Any], methods: Sequence[Settings], *, as_json: bool) -> list[Speed]:
    """Print the predicted step of each method on a link; the first sentence says that accuracy was not measured.

    Return what was predicted of the methods, without the baseline.

    Args:
        path: the profile.
        given: the options of `bench decide` that the user gave, by name.
        methods: the options of each method, the baseline first.
        as_json: True to print JSON for programs.

    Raises:
        UsageError: the file is not a profile, or a method or link cannot be predicted.
    """
    profile = Profile.read(path)
    options = link_options(given)
    if others := {text for method in methods for name, text in method.items() if name in ("strategy", "optimizer")}:
        raise UsageError(f"--from-profile cannot predict strategies or optimizers; leave out {min(others)}")
    jobs = [request_from_options(dataclasses.replace(options, **method)) for method in methods]
    baseline, *found = speeds(profile, jobs)
    link = dataclasses.replace(jobs[0], compressor=baseline.compressor, collective=baseline.collective)
    best = max(found, key=lambda each: each.factor)
    accuracy = ACCURACY.format(compressor=best.compressor, collective=best.collective)
    said = [
        *notes(profile, link),
        f"Differences of less than {ERROR:.0%} are open, because predictions may err by that",
    ]
    as_it_is_s = step_as_it_is(profile, jobs[0])
    if as_json:
        rows = [dataclasses.asdict(each) for each in (baseline, *found)]
        print_json({"accuracy": None, "step_as_it_is_s": as_it_is_s, "methods": rows, "notes": [accuracy, *said]})
        return found
    print(f"{accuracy}.")
    print(f"{profile.model} as it is, {heading(link, of_all=True)}: a step of {format_seconds(as_it_is_s)}")
    table = plain_table()
    for name in ("method", "collective", "step", f"vs {baseline.compressor}", "verdict", "faster up to"):
        table.add_column(name, justify="left" if name in ("method", "collective", "verdict") else "right")
    for each in (baseline, *found):
        rate = each.faster_up_to_bps
        cells = [each.compressor, each.collective, format_seconds(each.step_time_s), f"{each.factor:.2f}x"]
        up_to = "-" if rate is None else f">{format_rate(HIGHEST_BPS)}" if rate >= HIGHEST_BPS else format_rate(rate)
        table.add_row(*cells, "baseline" if each is baseline else each.verdict, up_to)
    stdout_console().print(table)
    print(*said, sep="\n")
    return found


def speeds(profile: Profile, jobs: Sequence[PredictionRequest]) -> list[Speed]:
    """Return the predicted step of each job, compared with the first."""
    ways = [on_each_collective(profile, job) for job in jobs]
    pairs = [fastest(profile, way) for way in ways]
    steps_s = [pair.prediction.step_time_s for pair in pairs]
    is_one_rate = len({dataclasses.replace(host, name="any") for host in jobs[0].hosts}) == 1 and not jobs[0].link_trace

    def factor_of(way: Sequence[PredictionRequest]) -> Callable[[float], float]:
        def factor(rate_bps: float) -> float:
            dense_s, own_s = (
                fastest(profile, [_at(each, rate_bps) for each in requests]).prediction.step_time_s
                for requests in (ways[0], way)
            )
            return dense_s / own_s

        return factor

    found = []
    for pair, way, step_s in zip(pairs, ways, steps_s, strict=True):
        factor = steps_s[0] / step_s
        rate_bps = pair.request.slowest_bps
        is_asked = is_one_rate and rate_bps is not None and way is not ways[0]
        found.append(
            Speed(
                compressor=pair.request.compressor,
                collective=pair.request.collective,
                step_time_s=step_s,
                factor=factor,
                verdict="faster" if factor > 1 + ERROR else "slower" if factor < 1 / (1 + ERROR) else "open",
                faster_up_to_bps=faster_up_to(factor_of(way), rate_bps) if is_asked and rate_bps is not None else None,
            )
        )
    return found


def faster_up_to(factor: Callable[[float], float], from_bps: float) -> float | None:
    """Return the highest rate in bits per second, up to `HIGHEST_BPS`, at which a factor exceeds 1 + `ERROR`, or None.

    Args:
        factor: seconds of the baseline's step / seconds of the method's step, at a rate of all links.
        from_bps: the lowest rate to try.
    """
    rates = np.geomspace(min(from_bps, HIGHEST_BPS / 10), HIGHEST_BPS, RATES)
    logs = np.log([factor(float(rate)) / (1 + ERROR) for rate in rates])
    above = np.flatnonzero(logs > 0)
    if not len(above):
        return None
    last = int(above[-1])
    if last == len(rates) - 1:
        return HIGHEST_BPS
    share = logs[last] / (logs[last] - logs[last + 1])
    return float(rates[last] * (rates[last + 1] / rates[last]) ** share)


def _at(request: PredictionRequest, rate_bps: float) -> PredictionRequest:
    hosts = [dataclasses.replace(host, uplink_bps=rate_bps, downlink_bps=rate_bps) for host in request.hosts]
    return dataclasses.replace(request, hosts=tuple(hosts))
