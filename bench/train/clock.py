"""Clocks: total training time and the times of steps.

Only code inside `TrainingClock.running()` counts as training time, so evaluation and set-up do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import torch


def device_time(device: torch.device) -> float:
    """Return the current time in seconds, after all work queued on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class TrainingClock:
    """Accumulate the time spent inside `running()` in `elapsed_s`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.elapsed_s = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside the block."""
        started = device_time(self.device)
        try:
            yield
        finally:
            self.elapsed_s += device_time(self.device) - started


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step.

    Attributes:
        total_s: the whole step, including loading the batch.
        cpu_s: CPU time of the process during the step, all threads together.
        until_exchanged_s: forward, backward and the wait for the exchange of gradients.
        waited_s: the wait within `until_exchanged_s`; None if unknown.
        encode_s, exchange_s: time that the exchange was busy, also during backward; None if DDP does not report it.
        exposed_s: all waiting after backward, including for what the optimizer exchanges; None if unknown.
    """

    total_s: float
    cpu_s: float
    until_exchanged_s: float
    waited_s: float | None
    encode_s: float | None
    exchange_s: float | None
    exposed_s: float | None


@dataclasses.dataclass(kw_only=True)
class StepTimes:
    """Times of the steps since the previous row."""

    steps: list[StepTime] = dataclasses.field(default_factory=list)

    def steps_per_s(self) -> float | None:
        """Return this rank's steps per second; None if no step was timed."""
        return len(self.steps) / sum(step.total_s for step in self.steps) if self.steps else None

    def columns(self) -> dict[str, float | None]:
        """Return the `speed` columns that are times; an empty dict if no step was timed.

        A part of a step is reported as its share of all steps' time, times the median step. Its mean could exceed the
        median step if a few steps are slow.
        """
        if not self.steps:
            return {}
        total = torch.tensor([s.total_s for s in self.steps], dtype=torch.float64)
        median_s, p95_s = total.quantile(torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
        shares = {name: self._share(name) for name in ("encode_s", "exchange_s", "exposed_s")}
        computing, waiting = self._share("until_exchanged_s"), self._share("waited_s")
        shares["forward_backward_s"] = computing and max(0.0, computing - (waiting or 0.0))
        parts = {name: share and share * median_s for name, share in shares.items()}
        return {"step_time_s": median_s, "step_time_p95_s": p95_s, **parts}

    def _share(self, part: str) -> float | None:
        known = [step for step in self.steps if getattr(step, part) is not None]  # DDP times only some steps
        part_s, total_s = sum(getattr(step, part) for step in known), sum(step.total_s for step in known)
        return part_s / total_s if known and part_s <= total_s else None  # longer than the steps: a clock is wrong


def mean(values: list[float] | list[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
