"""Notes that are printed with a prediction: its limits, and how well it was validated."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.core import environment
from bench.core.units import format_rate, format_seconds
from bench.extensions.predict.calibration import Calibration, Validated
from bench.extensions.predict.estimate import EstimatedCalibration
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.request import PredictionRequest

NOT_CHECKED = "Not yet checked against real runs on this machine"


def latency_note(config: PredictConfig, request: PredictionRequest) -> list[str]:
    """Return a note that latency is taken as 0, if neither an option nor a file gives a latency."""
    if len(request.hosts) == 1 or config.latency is not None or any(host.latency_s for host in request.hosts):
        return []
    how = "add --latency" if config.cluster_file is None else f"write it into {config.cluster_file}"
    return [f"Latency is taken as 0, because none is given; {how} (half the time that ping shows)"]


def notes(calibration: Calibration, request: PredictionRequest, *, range_too: bool = True) -> list[str]:
    """Return the notes that a user should read before trusting a prediction, one sentence each.

    Args:
        calibration: the calibration that the prediction was made from.
        request: the request that was predicted.
        range_too: also return how the request differs from the runs that predictions were checked against.
    """
    said = _origin(calibration)
    if any(host.jitter_s or host.loss for host in request.hosts):
        said.append("jitter and loss are not part of the model, and left out")
    if range_too and (reason := outside(calibration, request)):
        said.append(f"{NOT_CHECKED}: {reason}")
    if error := _known_error(calibration, request):
        said.append(error)
    return said


def _origin(calibration: Calibration) -> list[str]:
    """Return why the prediction is not based on a full measurement on this machine; empty if it is."""
    if isinstance(calibration, EstimatedCalibration):
        return [calibration.said]
    said = []
    if (calibration.cpu, calibration.cores) != (environment.cpu_model(), environment.usable_cores()):
        said.append(
            f"Calibrated on another machine ({calibration.cpu}, {calibration.cores} cores); the prediction is for "
            "that machine"
        )
    if calibration.cut:
        said.append(f"The calibration had little time: {', '.join(calibration.cut)}")
    return said


def range_notes(calibration: Calibration, ways: Sequence[PredictionRequest]) -> list[str]:
    """Return a note that says how many predictions differ from the runs that predictions were checked against."""
    reasons = [reason for request in ways if (reason := outside(calibration, request))]
    if not reasons:
        return []
    some = "" if len(reasons) == len(ways) else f" for {len(reasons)} of {len(ways)} predictions"
    same = f": {reasons[0]}" if len(set(reasons)) == 1 else ""
    return [f"{NOT_CHECKED}{some}{same}"]


def _known_error(calibration: Calibration, request: PredictionRequest) -> str | None:
    """Return a note with the errors of similar predictions from this calibration; None if none was checked."""
    errors = [abs(cell.error) for cell in _alike(calibration, request)]
    if not errors:
        return None
    elsewhere = request.shared_cores != calibration.cores
    where = f", whose ranks shared {calibration.cores} core(s), unlike these" if elsewhere else ""
    return (
        f"Such step times were checked against {len(errors)} real run(s){where}: off by "
        f"{statistics.median(errors):.1%} in the median, by {max(errors):.1%} at most"
    )


def _alike(calibration: Calibration, request: PredictionRequest) -> list[Validated]:
    """Return the validated runs with the same strategy, trigger, straggler and link trace."""
    as_asked = request.strategy, request.trigger, request.straggler_text, request.link_trace
    return [
        cell
        for cell in calibration.validated
        if (cell.strategy, cell.trigger, cell.straggler, cell.link_trace) == as_asked
    ]


def outside(calibration: Calibration, request: PredictionRequest) -> str | None:
    """Return why this request is outside the range that was checked against real runs; None if it is inside."""
    if isinstance(calibration, EstimatedCalibration):
        return "this is a rough estimate"
    if not calibration.validated:
        return "bench predict --validate does that"
    as_asked = request.strategy, request.trigger, request.straggler_text
    if not any((cell.strategy, cell.trigger, cell.straggler) == as_asked for cell in calibration.validated):
        beside = "without a straggler" if request.straggler is None else f"with the straggler {request.straggler}"
        return f"{request.strategy} {beside}, trigger {request.trigger}, was not measured"
    if not (checked := _alike(calibration, request)):
        return f"links that follow {request.link_trace or 'no trace'} were not measured"
    name = request.collective.partition(":")[0]
    if (request.compressor, name) not in {(cell.compressor, cell.collective.partition(":")[0]) for cell in checked}:
        return f"{request.compressor} on {name} was not measured"
    sizes = [cell.world_size for cell in checked]
    if not min(sizes) <= request.world_size <= max(sizes):
        return f"{request.world_size} ranks; {min(sizes)} to {max(sizes)} were measured"
    if request.ranks_per_host not in {cell.ranks_per_host for cell in checked}:
        return f"{request.ranks_per_host} rank(s) on a host were not measured"
    rates = [cell.bandwidth_bps for cell in checked if cell.bandwidth_bps is not None]
    if request.slowest_bps is None and len(rates) == len(checked):
        return "links that are not limited were not measured"
    if request.slowest_bps is not None and not (rates and min(rates) <= request.slowest_bps <= max(rates)):
        measured = f"{format_rate(min(rates))} to {format_rate(max(rates))}" if rates else "only links without a limit"
        return f"{format_rate(request.slowest_bps)}; {measured} were measured"
    latency = max(host.latency_s for host in request.hosts)
    if latency > max(cell.latency_s for cell in checked):
        return f"a latency of {format_seconds(latency)} is longer than any that was measured"
    return None
