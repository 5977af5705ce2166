"""What is said beside a prediction."""

from __future__ import annotations

import math
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
    return (
        f"such step times held against {len(errors)} measurement(s): off by {statistics.median(errors):.1%} in the "
        f"median, by {max(errors):.1%} at most"
    )


def _alike(calibration: Calibration, asked: Asked) -> list[Validated]:
    """What was measured with the same strategy and the same straggler, on links that change likewise."""
    as_asked = asked.strategy, asked.straggler_text, asked.link_trace
    return [cell for cell in calibration.validated if (cell.strategy, cell.straggler, cell.link_trace) == as_asked]


def outside(calibration: Calibration, asked: Asked) -> str | None:
    """Why a prediction is further than any that was held against a measurement; None where it is not."""
    if not calibration.validated:
        return "nothing that this calibration predicts was measured yet; see bench predict --validate"
    as_asked = asked.strategy, asked.straggler_text
    checked = [cell for cell in calibration.validated if (cell.strategy, cell.straggler) == as_asked]
    if not checked:
        beside = "without a straggler" if asked.straggler is None else f"with the straggler {asked.straggler}"
        return f"{asked.strategy} {beside} was not measured"
    if not (checked := _alike(calibration, asked)):
        return f"links that follow {asked.link_trace or 'no trace'} were not measured"
    name = asked.collective.partition(":")[0]
    if (asked.compressor, name) not in {(cell.compressor, cell.collective.partition(":")[0]) for cell in checked}:
        return f"{asked.compressor} on {name} was not measured"
    sizes = [cell.world_size for cell in checked]
    if not min(sizes) <= asked.world_size <= max(sizes):
        return f"{asked.world_size} ranks; {min(sizes)} to {max(sizes)} were measured"
    rates = [cell.bandwidth_bps or math.inf for cell in checked]
    rate = asked.slowest_bps or math.inf
    if not min(rates) <= rate <= max(rates):
        said = "links that are not limited" if math.isinf(rate) else format_rate(rate)
        return f"{said}; {format_rate(min(rates))} to {format_rate(max(rates))} were measured"
    latency = max(host.latency_s for host in asked.hosts)
    if latency > max(cell.latency_s for cell in checked):
        return f"a latency of {format_seconds(latency)}, longer than any that was measured"
    return None
