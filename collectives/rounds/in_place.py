"""Rounds carried out on a wire tensor in place: what comes is added to a stretch of it or replaces it.

A message that finds its buffer posted saves a round trip. So all buffers are posted at the start; only long tensors,
for which that would take too much memory, and NCCL, whose group calls want both sides at once, post them as they go.
"""

from __future__ import annotations

import functools
import itertools

import torch

from collectives.rounds.base import Round
from collectives.rounds.lost import WireLost
from collectives.transport.base import Pending, Receive, ReduceOp, Transport, wait_all
from collectives.transport.messages import combine_

EAGER_BYTES = 16 << 20
"""longest tensor whose messages all get memory of their own"""


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


def run_in_place(
    transport: Transport,
    wire: torch.Tensor,
    rounds: list[Round],
    op: ReduceOp,
    scratch: Scratch,
    lost: WireLost | None = None,
) -> None:
    """Carry the rounds out; the rounds of all ranks must mirror each other, one for one.

    Args:
        transport: the ranks.
        wire: what is summed, mutated.
        rounds: what this rank does.
        op: what to do with two elements.
        scratch: memory for what comes.
        lost: called with what rounding to 16 bits takes off the sums that this rank makes.
    """
    is_eager = wire.nbytes <= EAGER_BYTES and not transport.in_step
    buffers = _buffers(wire, rounds, scratch, is_eager=is_eager)
    num_ahead = len(rounds) if is_eager else 0 if transport.in_step else 1
    receives: list[list[Pending]] = []
    sends: list[Pending] = []
    for index, round_ in enumerate(rounds):
        to_post = range(len(receives), min(index + num_ahead + 1, len(rounds)))
        incoming: list[Receive] = []
        for later in to_post:
            sources = [message.peer for message in rounds[later].receives]
            incoming += zip(buffers[later], sources, strict=True)
        outgoing = [(wire[message.stretch], message.peer) for message in round_.sends]
        pendings = transport.post(outgoing, incoming)
        for later in to_post:
            count = len(buffers[later])
            receives.append(pendings[:count])
            pendings = pendings[count:]
        sends += pendings
        wait_all(receives[index])
        for message, buffer in zip(round_.receives, buffers[index], strict=True):
            if message.effect != "replace":
                stretch = message.stretch
                combine_(wire[stretch], buffer, op, lost and functools.partial(lost, stretch.start))
    wait_all(sends)


def _buffers(wire: torch.Tensor, rounds: list[Round], scratch: Scratch, *, is_eager: bool) -> list[list[torch.Tensor]]:
    """Where each message of each round is received: in place if it replaces, else in scratch memory.

    Unless every round has memory of its own, two sets alternate, as buffers are posted at most one round ahead.
    """
    needs = [sum(message.numel for message in round_.receives if message.effect != "replace") for round_ in rounds]
    most = max(needs, default=0)
    starts = [0, *itertools.accumulate(needs)] if is_eager else [index % 2 * most for index in range(len(rounds))]
    memory = scratch.take(sum(needs) if is_eager else 2 * most, wire)
    buffers = []
    for round_, start in zip(rounds, starts, strict=False):
        row = []
        for message in round_.receives:
            if message.effect == "replace":
                row.append(wire[message.stretch])
            else:
                row.append(memory[start : start + message.numel])
                start += message.numel
        buffers.append(row)
    return buffers
