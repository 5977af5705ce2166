"""The steps of a dense all-reduce: who sends what to whom when, as data, and the one loop that carries it out.

A message that finds its buffer posted saves a round trip. So buffers are posted one step ahead where the transport
allows it, and for short tensors, where round trips are what costs, all of them at the start.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch

from collectives.arithmetic import combine_
from collectives.transport import Pending, Receive, ReduceOp, Send, Transport, wait_all

EAGER_BYTES = 4 << 20
"""up to here every message gets a buffer of its own and is copied into place: cheaper than waiting"""


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
        overwrites: the last earlier step that sent what this one replaces; -1 for none.
    """

    sends: list[Send] = dataclasses.field(default_factory=list)
    receives: list[Incoming] = dataclasses.field(default_factory=list)
    overwrites: int = -1

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Add a message; an empty one is left out on both sides."""
        if tensor.numel():
            self.sends.append((tensor, to))

    def add(self, target: torch.Tensor, source: int) -> None:
        """Add a receive that is summed into `target`."""
        if target.numel():
            self.receives.append(Incoming(target, source, is_added=True))

    def replace(self, target: torch.Tensor, source: int, *, overwrites: int) -> None:
        """Add a receive that replaces `target`, which step `overwrites` sent."""
        if target.numel():
            self.receives.append(Incoming(target, source, is_added=False))
            self.overwrites = max(self.overwrites, overwrites)


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
    sends: list[list[Pending]] = []
    for index, step in enumerate(steps):
        incoming: list[Receive] = []
        first_new = len(receives)
        for later in range(first_new, min(index + num_ahead + 1, len(steps))):
            overwritten = -1 if is_eager else steps[later].overwrites
            if overwritten >= index:
                break  # what lies there has not even been sent
            if overwritten >= 0:
                wait_all(sends[overwritten])
            sources = [message.source for message in steps[later].receives]
            incoming += zip(buffers[later], sources, strict=True)
            receives.append([])
        pendings = transport.post(step.sends, incoming)
        for posted in range(first_new, len(receives)):
            count = len(buffers[posted])
            receives[posted], pendings = pendings[:count], pendings[count:]
        sends.append(pendings)
        wait_all(receives[index])
        if is_eager and step.overwrites >= 0:
            wait_all(sends[step.overwrites])
        for message, buffer in zip(step.receives, buffers[index], strict=True):
            if message.is_added:
                combine_(message.target, buffer, op)
            elif is_eager:
                message.target.copy_(buffer)
    for pending in sends:
        wait_all(pending)


def _buffers(wire: torch.Tensor, steps: list[Step], scratch: Scratch, *, is_eager: bool) -> list[list[torch.Tensor]]:
    """Where each message of each step is received.

    Two sets of scratch memory alternate, as buffers are posted one step ahead; eager messages share nothing.
    """

    def needs_scratch(message: Incoming) -> bool:
        return message.is_added or is_eager

    needs = [sum(message.target.numel() for message in filter(needs_scratch, step.receives)) for step in steps]
    most = max(needs, default=0)
    starts = [0, *itertools.accumulate(needs)] if is_eager else [index % 2 * most for index in range(len(steps))]
    memory = scratch.take(sum(needs) if is_eager else 2 * most, wire)
    buffers = []
    for step, start in zip(steps, starts, strict=False):
        row = []
        for message in step.receives:
            if needs_scratch(message):
                row.append(memory[start : start + message.target.numel()])
                start += message.target.numel()
            else:
                row.append(message.target)
        buffers.append(row)
    return buffers
