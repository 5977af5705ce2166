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
        """Return the `speed` columns that are times; none where no step was timed.

        Sums of parts are set against sums of whole steps and scaled to the median step: means beside a median would
        exceed it where a few steps are slow.
        """
        if not self.steps:
            return {}
        total = torch.tensor([s.total_s for s in self.steps], dtype=torch.float64)
        median_s = float(total.quantile(0.5))
        computing, waiting = self._share("until_exchanged_s"), self._share("waited_s")
        shares = {
            "forward_backward_s": computing and max(0.0, computing - (waiting or 0.0)),
            "encode_s": self._share("encode_s"),
            "exchange_s": self._share("exchange_s"),
            "exposed_s": self._share("exposed_s"),
        }
        return {
            "step_time_s": median_s,
            "step_time_p95_s": float(total.quantile(0.95)),
            **{name: share and share * median_s for name, share in shares.items()},
        }

    def _share(self, part: str) -> float | None:
        """Return the share of a part in the steps of which it is known.

        None where it is known of no step, or takes longer than the steps: then one of two clocks is wrong.
        """
        known = [step for step in self.steps if getattr(step, part) is not None]  # DDP tells `exposed_s` of some only
        part_s, total_s = sum(getattr(step, part) for step in known), sum(step.total_s for step in known)
        return part_s / total_s if known and part_s <= total_s else None


def mean(values: list[float] | list[float | None]) -> float | None:
    """The mean of the values that are there; None where there is none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
