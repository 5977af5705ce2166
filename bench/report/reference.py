"""Compare runs with committed reference runs of the same name and seed, in the columns that must repeat.

Bytes repeat everywhere. Accuracy at a fixed seed repeats exactly on the same processor with the same torch; elsewhere
sums are rounded differently and training drifts apart (in the runs of `benchmarks/ci.py` by up to 1.3 points of
accuracy, with another number of threads).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.report.gates import GateResult
from bench.report.runs import Run

TOLERANCE = 0.03  # allowed difference of accuracy, as a share, on another processor or with another torch

_SAME_ROUNDING = ("cpu", "torch_version", "device", "threads")


def check_reference(runs: Sequence[Run], reference: Sequence[Run]) -> GateResult:
    """Compare runs with the reference; of each name and seed the newest successful run counts.

    Returns:
        Changes as ``crossed``, and runs that only one side has as ``unmeasured``.
    """
    ours, theirs = _by_name(runs), _by_name(reference)
    return GateResult(
        crossed=[f"{key}: {change}" for key in theirs if key in ours for change in _changes(ours[key], theirs[key])],
        unmeasured=[
            *(f"{key} is in the reference, but no such run ended well" for key in theirs if key not in ours),
            *(f"{key} is not in the reference; renew it" for key in ours if key not in theirs),
        ],
    )


def _by_name(runs: Sequence[Run]) -> dict[str, Run]:
    well = sorted((run for run in runs if run.ended_well), key=lambda run: run["started_at"] or "")
    return {f"{run['name']} seed {run['seed']}": run for run in well}


def _changes(run: Run, reference: Run) -> Iterator[str]:
    now, then = run["payload_bytes_per_step"], reference["payload_bytes_per_step"]
    if now != then:
        more = f" ({now / then - 1.0:+.1%})" if now and then else ""
        yield f"payload_bytes_per_step was {then} and is {now}{more}"
    now, then = run["test_accuracy"], reference["test_accuracy"]
    exact = all(run[name] == reference[name] for name in _SAME_ROUNDING)
    allowed = 0.0 if exact else TOLERANCE
    if now != then and (None in (now, then) or abs(now - then) > allowed):
        where = "on the same processor and torch" if exact else f"more than {TOLERANCE:.0%} on another machine or torch"
        yield f"test_accuracy was {then} and is {now}, {where}"
