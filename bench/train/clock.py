"""Clocks: total training time and the times of steps.

Only code inside `TrainingClock.running()` counts as training time, so evaluation and set-up do not.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from bench.core.run_folder import RunFolder, read_json
from collectives.base import Key
from collectives.payloads.base import Payload
from compressors.ddp.report import StepReport

_COPIED = ("measured_bandwidth_bps", "measured_rtt_s", "measured_loss_ratio", "wire_headers")


def link_columns(folder: RunFolder) -> dict[str, Any]:
    """Return the measured columns, `wire_headers` and `link_warnings`; all are empty without virtual hosts."""
    measured = read_json(folder.link) or {}
    columns = {name: measured.get(name) for name in _COPIED}
    return columns | {"link_warnings": "; ".join(measured.get("warnings", ()))}


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

    @classmethod
    def of(cls, report: StepReport, *, total_s: float, cpu_s: float) -> Self:
        """Return the times of a step that made this report."""
        return cls(
            total_s=total_s,
            cpu_s=cpu_s,
            until_exchanged_s=total_s - report.update_s,
            waited_s=None if report.exposed_s is None else report.exposed_s - report.update_exposed_s,
            encode_s=report.encode_s,
            exchange_s=report.exchange_s,
            exposed_s=report.exposed_s,
        )


@dataclasses.dataclass(kw_only=True)
class StepTimes:
    """Times of the steps since the previous row."""

    steps: list[StepTime] = dataclasses.field(default_factory=list)

    def steps_per_s(self) -> float | None:
        """Return this rank's steps per second; None if no step was timed."""
        return len(self.steps) / sum(step.total_s for step in self.steps) if self.steps else None

    def cpu_s_per_step(self) -> float | None:
        """Return this rank's mean CPU time per step in seconds; None if no step was timed."""
        return mean([step.cpu_s for step in self.steps])

    def columns(self) -> dict[str, float | None]:
        """Return the `speed` columns that are times; an empty dict if no step was timed.

        A part of a step is reported as its share of all steps' time, times the median step. Its mean could exceed the
        median step if a few steps are slow.
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
        """Return a part's share of the total time of those steps for which the part is known.

        None if it is known for no step, or if it takes longer than the steps, because one of the clocks is then wrong.
        """
        known = [step for step in self.steps if getattr(step, part) is not None]  # DDP times only some steps
        part_s, total_s = sum(getattr(step, part) for step in known), sum(step.total_s for step in known)
        return part_s / total_s if known and part_s <= total_s else None


def mean(values: list[float] | list[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


# Largest number of sampled positions in the model, the same on all ranks: 64 KiB of bits before compression.
MAX_POSITIONS = 1 << 19

# By the ids of a payload's layers: the sampled positions that it transmits, as compressed bits in base64 for JSON.
Samples = dict[str, str]


def support_overlap(payloads: Sequence[Payload]) -> float | None:
    """Return the share of entries that two ranks both send, 2 |A and B| / (|A| + |B|), as the mean over pairs of ranks.

    None if a payload sends every element, or if no payload sends any.
    """
    if any(payload.num_entries == payload.numel for payload in payloads):
        return None
    return _mean_overlap([_support(payload) for payload in payloads])


def sample_index_sets(payloads: Mapping[Key, Payload], model_numel: int) -> Samples:
    """Return a sample of the positions that one rank's payloads transmit, for `sampled_overlap`.

    Args:
        payloads: payloads by their layers' ids; none sends every element.
        model_numel: number of elements of the model, which determines the share of sampled positions.
    """
    share = min(1.0, MAX_POSITIONS / model_numel)
    return {str(key): _text(_sample(_support(payload), share, seed=key[0])) for key, payload in payloads.items()}


def sampled_overlap(of_ranks: Sequence[Samples]) -> float | None:
    """Return the support overlap over the payloads that every rank has made; None if there are none."""
    common = sorted(set.intersection(*(set(samples) for samples in of_ranks)))
    if not common:
        return None
    return _mean_overlap([torch.cat([_bits(samples[key]) for key in common]) for samples in of_ranks])


def _support(payload: Payload) -> torch.Tensor:
    """Return the mask of transmitted elements, bool [numel]."""
    untouched = torch.ones(payload.numel, device=payload.device)
    payload.clear_in_(untouched)
    return untouched == 0


def _sample(support: torch.Tensor, share: float, *, seed: int) -> torch.Tensor:
    """Return this share of the positions, drawn at random, equally on every rank.

    A fixed stride could coincide with the period of groups or rows.
    """
    if share == 1:
        return support.cpu()
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(support.numel(), (math.ceil(share * support.numel()),), generator=generator)
    return support[positions.to(support.device)].cpu()


def _text(bits: torch.Tensor) -> str:
    return base64.b64encode(zlib.compress(np.packbits(bits.numpy()).tobytes())).decode()


def _bits(text: str) -> torch.Tensor:
    packed = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(packed)).bool()


def _mean_overlap(index_sets: Sequence[torch.Tensor]) -> float | None:
    """Return the mean overlap over pairs of masks, bool [numel]; None if every mask is empty."""
    shares = []
    for one, other in itertools.combinations(index_sets, 2):
        entries = int(one.sum()) + int(other.sum())
        if entries:
            shares.append(2 * int((one & other).sum()) / entries)
    return sum(shares) / len(shares) if shares else None
