"""Predict the step of each method in the user's own script, for `bench decide --from-profile`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.errors import UsageError
from bench.deciding.speed import PredictedMethod, PredictedSteps
from bench.extensions.predict.fastest import fastest
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.ranking import on_each_collective, step_as_it_is
from bench.extensions.predict.request import (
    PredictionRequest,
    first_epoch_columns,
    predicted_in_first_epoch,
    request_from_options,
)
from bench.extensions.predict.script_profile import Profile
from bench.extensions.predict.sentences import first_epoch_note, heading
from bench.extensions.predict.validation import notes
from bench.launch.sweep_file import Settings


def profiled_steps(path: Path, given: dict[str, Any], methods: Sequence[Settings]) -> PredictedSteps:
    """Return the predicted steps of methods in the script that was profiled.

    Args:
        path: the profile.
        given: the options of `bench decide` that the user gave, by name.
        methods: the options of each method; the baseline comes first.

    Raises:
        UsageError: the file is not a profile, an option has no meaning for it, or a method cannot be predicted.
    """
    profile = Profile.read(path)
    possible = {option.name for option in PredictConfig.options()} - {
        "strategy",
        "model",
        "dataset",
        "classes",
        "batch_size",
        "step_time",
        "parameters",
        "device",
    }
    if others := sorted(given.keys() - possible):
        raise UsageError(
            f"--from-profile predicts the steps of your own script; leave out --{others[0].replace('_', '-')}"
        )
    options = PredictConfig(**given)
    if unknown := {text for method in methods for name, text in method.items() if name in ("strategy", "optimizer")}:
        raise UsageError(f"--from-profile cannot predict strategies or optimizers; leave out {min(unknown)}")
    jobs = [request_from_options(dataclasses.replace(options, **method)) for method in methods]
    found = [_predicted(profile, job) for job in jobs]
    link = dataclasses.replace(jobs[0], compressor=found[0].compressor, collective=found[0].collective)
    is_one_rate = len({dataclasses.replace(host, name="any") for host in link.hosts}) == 1 and not link.link_trace
    return PredictedSteps(
        title=f"{profile.about} as it is, {heading(link, of_all=True)}",
        as_it_is_s=step_as_it_is(profile, jobs[0]),
        methods=found,
        rate_bps=link.slowest_bps if is_one_rate else None,
        notes=[*first_epoch_note(profile, [method.compressor for method in found]), *notes(profile, link)],
    )


def _predicted(profile: Profile, job: PredictionRequest) -> PredictedMethod:
    ways = on_each_collective(profile, job)
    best = fastest(profile, ways)

    def at_rate(rate_bps: float) -> float:
        return fastest(profile, [_on_links_of(way, rate_bps) for way in ways]).prediction.step_time_s

    return PredictedMethod(
        compressor=best.request.compressor,
        collective=best.request.collective,
        step_time_s=best.prediction.step_time_s,
        payload_bytes_per_step=best.prediction.payload_bytes_per_step,
        **first_epoch_columns(predicted_in_first_epoch(profile, best.request)),
        at_rate=at_rate,
    )


def _on_links_of(request: PredictionRequest, rate_bps: float) -> PredictionRequest:
    hosts = [dataclasses.replace(host, uplink_bps=rate_bps, downlink_bps=rate_bps) for host in request.hosts]
    return dataclasses.replace(request, hosts=tuple(hosts))
