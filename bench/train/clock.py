"""Clocks: what counts as training time, and how long steps take.

Evaluation and set-up are outside by construction: only code inside `TrainingClock.running()` is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import torch


def device_time(device: torch.device) -> float:
    """Now, in seconds, after all work queued on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class TrainingClock:
    """Accumulates time spent training; `elapsed_s` excludes everything outside `running()`."""

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
        total_s: the whole step, batch preparation included.
        cpu_s: CPU time of the process meanwhile, all threads together.
        until_exchanged_s: forward, backward, and what was waited for after them.
        waited_s: what of it was waited for, as `exposed_s`, which holds what an optimizer sends later as well.
        encode_s, exchange_s: busy time of the exchange, beside backward; None where the engine hides it.
        exposed_s: what the step waited for after backward's own work had ended; None where the engine did not say.
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
        """How fast this rank goes; None where no step was timed."""
        return len(self.steps) / sum(step.total_s for step in self.steps) if self.steps else None

    def cpu_s_per_step(self) -> float | None:
        """This rank's CPU time; None where no step was timed."""
        return mean([step.cpu_s for step in self.steps])

    def columns(self) -> dict[str, float | None]:
        """The `speed` columns that are times; all None where no step was timed."""
        if not self.steps:
            return {}
        total = torch.tensor([s.total_s for s in self.steps], dtype=torch.float64)
        waited_s = mean([s.waited_s for s in self.steps])  # DDP says it of some steps only
        until_exchanged_s = mean([s.until_exchanged_s for s in self.steps])
        assert until_exchanged_s is not None
        return {
            "step_time_s": float(total.quantile(0.5)),
            "step_time_p95_s": float(total.quantile(0.95)),
            "forward_backward_s": max(0.0, until_exchanged_s - (waited_s or 0.0)),
            "encode_s": mean([s.encode_s for s in self.steps]),
            "exchange_s": mean([s.exchange_s for s in self.steps]),
            "exposed_s": mean([s.exposed_s for s in self.steps]),
        }


def mean(values: list[float] | list[float | None]) -> float | None:
    """The mean of the values that are there; None where there is none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
