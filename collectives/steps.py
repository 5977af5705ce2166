"""The steps of a dense all-reduce: who sends what to whom when, as data, and the one loop that carries it out.

A step's buffers are posted one step ahead where the transport allows it, because a message that finds its buffer
waiting saves a round trip.
"""

from __future__ import annotations

import dataclasses

import torch

from collectives.arithmetic import combine_
from collectives.transport import Pending, Receive, ReduceOp, Send, Transport, wait_all


@dataclasses.dataclass
class Step:
    """What one rank sends and receives at the same time.

    Attributes:
        sends: slices of the wire tensor, in the state in which the previous steps left them.
        receives: where to put what comes.
        sums: (target, received): added when the receives are complete, in this order.
        overwrites: the earlier step whose sends lie where this step receives; -1 for none.
    """

    sends: list[Send] = dataclasses.field(default_factory=list)
    receives: list[Receive] = dataclasses.field(default_factory=list)
    sums: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)
    overwrites: int = -1

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Add a message; an empty one is left out on both sides."""
        if tensor.numel():
            self.sends.append((tensor, to))

    def receive(self, tensor: torch.Tensor, source: int, *, overwrites: int) -> None:
        """Add a receive that replaces `tensor`, which step `overwrites` sent."""
        if tensor.numel():
            self.receives.append((tensor, source))
            self.overwrites = max(self.overwrites, overwrites)

    def receive_and_add(self, target: torch.Tensor, source: int, scratch: torch.Tensor) -> None:
        """Add a receive that is summed into `target`; `scratch` must be free at this step and the one before."""
        if target.numel():
            self.receives.append((scratch[: target.numel()], source))
            self.sums.append((target, scratch[: target.numel()]))


def run(transport: Transport, steps: list[Step], op: ReduceOp) -> None:
    """Carry the steps out; the steps of all ranks must mirror each other, one for one."""
    receives: list[list[Pending]] = []
    sends: list[list[Pending]] = []
    for index, step in enumerate(steps):
        ahead = index if transport.in_step else index + 1
        incoming: list[Receive] = []
        num_posted = len(receives)
        for later in steps[num_posted : ahead + 1]:
            if later.overwrites >= index:
                break  # what lies there has not even been sent
            if later.overwrites >= 0:
                wait_all(sends[later.overwrites])
            incoming += later.receives
            num_posted += 1
        pendings = transport.post(step.sends, incoming)
        for later in steps[len(receives) : num_posted]:
            receives.append(pendings[: len(later.receives)])
            pendings = pendings[len(later.receives) :]
        sends.append(pendings)
        wait_all(receives[index])
        for target, received in step.sums:
            combine_(target, received, op)
    for pending in sends:
        wait_all(pending)


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
