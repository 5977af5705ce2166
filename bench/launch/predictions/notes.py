"""What is said beside a prediction."""

from __future__ import annotations

import statistics

from bench.core import environment
from bench.core.parts import Calibration, Validated
from bench.core.units import format_rate, format_seconds
from bench.launch.predictions.asked import Asked


def notes(calibration: Calibration, asked: Asked, *, range_too: bool = True) -> list[str]:
    """What a user should know before trusting a prediction, one sentence each; `range_too`: also what was validated."""
    said = []
    if (calibration.cpu, calibration.cores) != (environment.cpu_model(), environment.usable_cores()):
        said.append(
            f"calibrated on {calibration.cpu} ({calibration.cores} cores), which this machine is not: that one is what "
            "is predicted"
        )
    if any(host.jitter_s or host.loss for host in asked.hosts):
        said.append("jitter and loss are not part of the model, and left out")
    if range_too and (reason := outside(calibration, asked)):
        said.append(f"outside the validated range: {reason}")
    if error := _known_error(calibration, asked):
        said.append(error)
    return said


def _known_error(calibration: Calibration, asked: Asked) -> str | None:
    """How far step times were off that were predicted from this calibration under this strategy; None: nobody knows."""
    errors = [abs(cell.error) for cell in _alike(calibration, asked)]
    if not errors:
        return None
    elsewhere = asked.shared_cores != calibration.cores
    where = f" of ranks that share {calibration.cores} core(s), as these do not" if elsewhere else ""
    return (
        f"such step times held against {len(errors)} measurement(s){where}: off by {statistics.median(errors):.1%} in "
        f"the median, by {max(errors):.1%} at most"
    )


def _alike(calibration: Calibration, asked: Asked) -> list[Validated]:
    """What was measured with the same strategy, trigger and straggler, on links that change likewise."""
    as_asked = asked.strategy, asked.trigger, asked.straggler_text, asked.link_trace
    return [
        cell
        for cell in calibration.validated
        if (cell.strategy, cell.trigger, cell.straggler, cell.link_trace) == as_asked
    ]


def outside(calibration: Calibration, asked: Asked) -> str | None:
    """Why a prediction is further than any that was held against a measurement; None where it is not."""
    if not calibration.validated:
        return "nothing that this calibration predicts was measured yet; see bench predict --validate"
    as_asked = asked.strategy, asked.trigger, asked.straggler_text
    if not any((cell.strategy, cell.trigger, cell.straggler) == as_asked for cell in calibration.validated):
        beside = "without a straggler" if asked.straggler is None else f"with the straggler {asked.straggler}"
        return f"{asked.strategy} {beside}, trigger {asked.trigger}, was not measured"
    if not (checked := _alike(calibration, asked)):
        return f"links that follow {asked.link_trace or 'no trace'} were not measured"
    name = asked.collective.partition(":")[0]
    if (asked.compressor, name) not in {(cell.compressor, cell.collective.partition(":")[0]) for cell in checked}:
        return f"{asked.compressor} on {name} was not measured"
    sizes = [cell.world_size for cell in checked]
    if not min(sizes) <= asked.world_size <= max(sizes):
        return f"{asked.world_size} ranks; {min(sizes)} to {max(sizes)} were measured"
    if asked.ranks_per_host not in {cell.ranks_per_host for cell in checked}:
        return f"{asked.ranks_per_host} rank(s) on a host were not measured"
    rates = [cell.bandwidth_bps for cell in checked if cell.bandwidth_bps is not None]
    if asked.slowest_bps is None and len(rates) == len(checked):
        return "links that are not limited were not measured"
    if asked.slowest_bps is not None and not (rates and min(rates) <= asked.slowest_bps <= max(rates)):
        measured = f"{format_rate(min(rates))} to {format_rate(max(rates))}" if rates else "only links without a limit"
        return f"{format_rate(asked.slowest_bps)}; {measured} were measured"
    latency = max(host.latency_s for host in asked.hosts)
    if latency > max(cell.latency_s for cell in checked):
        return f"a latency of {format_seconds(latency)}, longer than any that was measured"
    return None
