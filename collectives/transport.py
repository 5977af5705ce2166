"""Transport: the one place where bytes leave a rank, and where they are counted.

Two implementations: `collectives/distributed.py` over torch.distributed (gloo, NCCL) and `collectives/memory.py` where ranks are threads,
for contract tests. Every operation has a bounded wait and knows its peer.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

Purpose = Literal["gradient", "control", "state"]
ReduceOp = Literal["sum", "max"]


class TransportError(RuntimeError):
    """A peer was lost or did not answer in time; `lost_rank` names it where it is known."""

    def __init__(self, message: str, lost_rank: int | None = None) -> None:
        super().__init__(message)
        self.lost_rank = lost_rank


@dataclasses.dataclass
class Traffic:
    """What one rank has sent for one purpose since the start.

    Attributes:
        messages: number of messages sent.
        nbytes: bytes sent.
        seconds: time spent in calls of the transport, waiting included.
        from_formula: some of it went through the backend's own collectives, whose bytes follow from a formula.
    """

    messages: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    from_formula: bool = False


class Pending(abc.ABC):
    """A send or receive under way."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until it is done.

        Raises:
            TransportError: the peer is lost or the time is up.
        """


class Transport(abc.ABC):
    """The ranks that take part, and messages between them.

    Attributes:
        rank: this process, 0..world_size-1 within this transport.
        world_size: number of ranks.
        device: where tensors must lie for this backend.
        traffic: what was sent, per purpose; shared with all views of this transport.
    """

    rank: int
    world_size: int
    device: torch.device
    traffic: dict[Purpose, Traffic]
    purpose: Purpose = "gradient"

    @contextlib.contextmanager
    def counted_as(self, purpose: Purpose) -> Iterator[None]:
        """Count what is sent inside the block for another purpose."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    @abc.abstractmethod
    def send(self, tensor: torch.Tensor, to: int) -> Pending:
        """Start sending a contiguous tensor of any dtype; it must not change before `wait` returned."""

    @abc.abstractmethod
    def receive_into(self, tensor: torch.Tensor, source: int) -> Pending:
        """Start receiving into a contiguous tensor (mutated); a shorter message leaves its tail untouched."""

    @abc.abstractmethod
    def all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """The backend's own all-reduce in place; every rank must call. Bytes are counted by the ring's formula."""

    @abc.abstractmethod
    def broadcast_(self, tensor: torch.Tensor, source: int) -> None:
        """The backend's own broadcast in place; every rank must call."""

    @abc.abstractmethod
    def agree(self, values: Sequence[float], op: ReduceOp = "max") -> list[float]:
        """Flags and shared scalars, combined over ranks in float64; counted as control. Every rank must call."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks; counted as control."""

    @abc.abstractmethod
    def view(self, ranks: Sequence[int]) -> Transport:
        """The same wires, restricted to `ranks` (numbered 0.. in the given order); this rank must be among them.

        Every rank of `ranks` must call, in the same order relative to its other calls.
        """
