"""The steps of a dense all-reduce: who sends what to whom when, as data, and the one loop that carries it out.

A message that finds its buffer posted saves a round trip. So all buffers are posted at the start; only long tensors,
for which that would take too much memory, and NCCL, whose group calls want both sides at once, post them as they go.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch

from collectives.transport.arithmetic import combine_
from collectives.transport.base import Pending, Receive, ReduceOp, Send, Transport, wait_all

EAGER_BYTES = 16 << 20
"""longest tensor whose messages all get memory of their own"""


@dataclasses.dataclass
class Incoming:
    """A message that one step receives.

    Attributes:
        target: the slice of the wire tensor that it changes.
        source: the rank that sends it.
        is_added: it is added to the target; otherwise it replaces it.
    """

    target: torch.Tensor
    source: int
    is_added: bool


@dataclasses.dataclass
class Step:
    """What one rank sends and receives at the same time.

    Attributes:
        sends: slices of the wire tensor, in the state in which the previous steps left them.
        receives: what comes meanwhile, applied in this order.
    """

    sends: list[Send] = dataclasses.field(default_factory=list)
    receives: list[Incoming] = dataclasses.field(default_factory=list)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Add a message; an empty one is left out on both sides."""
        if tensor.numel():
            self.sends.append((tensor, to))

    def add(self, target: torch.Tensor, source: int) -> None:
        """Add a receive that is summed into `target`."""
        if target.numel():
            self.receives.append(Incoming(target, source, is_added=True))

    def replace(self, target: torch.Tensor, source: int) -> None:
        """Add a receive that replaces `target` by its total.

        It may be received in place and posted early: the total holds what was sent from there, so it cannot come before
        that send was read.
        """
        if target.numel():
            self.receives.append(Incoming(target, source, is_added=False))


class Scratch:
    """Memory that is kept from call to call: fresh pages for every message would cost as much as adding it."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, torch.Tensor] = {}

    def take(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """1-D [numel] with the dtype and device of `like`, contents undefined; overwrites what was taken before."""
        kept = self._kept.get(like.dtype)
        if kept is None or kept.numel() < numel or kept.device != like.device:
            kept = self._kept[like.dtype] = like.new_empty(numel)
        return kept[:numel]


def run(transport: Transport, wire: torch.Tensor, steps: list[Step], op: ReduceOp, scratch: Scratch) -> None:
    """Carry the steps out; the steps of all ranks must mirror each other, one for one.

    Args:
        transport: the ranks.
        wire: what is summed, mutated through the slices that the steps hold.
        steps: what this rank does.
        op: what to do with two elements.
        scratch: memory for what comes.
    """
    is_eager = wire.nbytes <= EAGER_BYTES and not transport.in_step
    buffers = _buffers(wire, steps, scratch, is_eager=is_eager)
    num_ahead = len(steps) if is_eager else 0 if transport.in_step else 1
    receives: list[list[Pending]] = []
    sends: list[Pending] = []
    for index, step in enumerate(steps):
        to_post = range(len(receives), min(index + num_ahead + 1, len(steps)))
        incoming: list[Receive] = []
        for later in to_post:
            sources = [message.source for message in steps[later].receives]
            incoming += zip(buffers[later], sources, strict=True)
        pendings = transport.post(step.sends, incoming)
        for later in to_post:
            count = len(buffers[later])
            receives.append(pendings[:count])
            pendings = pendings[count:]
        sends += pendings
        wait_all(receives[index])
        for message, buffer in zip(step.receives, buffers[index], strict=True):
            if message.is_added:
                combine_(message.target, buffer, op)
    wait_all(sends)


def _buffers(wire: torch.Tensor, steps: list[Step], scratch: Scratch, *, is_eager: bool) -> list[list[torch.Tensor]]:
    """Where each message of each step is received: in place if it replaces, else in scratch memory.

    Unless every step has memory of its own, two sets alternate, as buffers are posted at most one step ahead.
    """
    needs = [sum(message.target.numel() for message in step.receives if message.is_added) for step in steps]
    most = max(needs, default=0)
    starts = [0, *itertools.accumulate(needs)] if is_eager else [index % 2 * most for index in range(len(steps))]
    memory = scratch.take(sum(needs) if is_eager else 2 * most, wire)
    buffers = []
    for step, start in zip(steps, starts, strict=False):
        row = []
        for message in step.receives:
            stop = start + message.target.numel()
            row.append(memory[start:stop] if message.is_added else message.target)
            start = stop if message.is_added else start
        buffers.append(row)
    return buffers
