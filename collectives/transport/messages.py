"""Payloads as messages: packing for a transport, how long a message can be, and one message brought to every rank."""

from __future__ import annotations

import torch

from collectives.payloads.base import HEADER_BYTES, Payload, PayloadError
from collectives.transport.base import Transport, wait_all

_WIDEST_ELEMENT = 8
_PER_LEAF = 4 * HEADER_BYTES
_SPARE_LEAVES = 1024


def bound_nbytes(numel: int, num_leaves: int) -> int:
    """A length that no packed payload of `numel` elements and so many leaves exceeds: known to all without asking.

    Every kind chooses a coding no longer than its elements written out, plus a bitmap, plus a header with the kind's
    fixed fields; a sum may come in a few more pieces than the payload had. Memory that no message fills is never
    touched, so being generous costs nothing.
    """
    return (_WIDEST_ELEMENT + 1) * numel + _PER_LEAF * (num_leaves + _SPARE_LEAVES)


def pack(payload: Payload, transport: Transport, bound: int | None = None) -> torch.Tensor:
    """The payload's bytes where the transport wants them.

    Args:
        payload: what to send.
        transport: over which it goes.
        bound: what the receivers have room for; None where they are told the length first.

    Raises:
        PayloadError: longer than the receivers expect, which would end a gloo process.
    """
    packed = payload.pack().to(transport.device)
    if bound is not None and packed.numel() > bound:
        raise PayloadError(
            f"a {type(payload).__name__} of {packed.numel()} bytes is longer than the {bound} bytes that its "
            f"{payload.numel} elements can need; all ranks must sum payloads of one kind and length"
        )
    return packed


def broadcast_bytes(transport: Transport, message: torch.Tensor | None, source: int) -> torch.Tensor:
    """A message of rank `source`, on every rank, down a binomial tree; every rank must call.

    Args:
        transport: the ranks.
        message: uint8 1-D on rank `source`, whose length is told first (8 bytes of control); None elsewhere.
        source: who has it.

    Returns:
        The message; on rank `source` the tensor given.

    Raises:
        TransportError: a rank was lost, or did not answer in time.
    """
    parent, children = binomial_links(transport.rank, transport.world_size, source)
    if parent is not None:
        length = torch.empty(1, dtype=torch.int64, device=transport.device)
        with transport.counted_as("control"):
            transport.receive_into(length, parent).wait()
        message = torch.empty(int(length), dtype=torch.uint8, device=transport.device)
        transport.receive_into(message, parent).wait()
    if message is None:
        raise PayloadError(f"rank {source} must give the payload that it broadcasts")
    length = torch.tensor([message.numel()], device=transport.device)
    pendings = []
    for child in children:
        with transport.counted_as("control"):
            pendings.append(transport.send(length, child))
        pendings.append(transport.send(message, child))
    wait_all(pendings)
    return message


def broadcast_wire_(transport: Transport, wire: torch.Tensor, source: int) -> None:
    """The wire tensor of rank `source`, on every rank, as `broadcast_bytes` but without telling its length.

    Args:
        transport: the ranks, all of which must call.
        wire: 1-D, contiguous, of one length and dtype on all ranks; overwritten except on rank `source`.
        source: who has it.
    """
    if not wire.numel():
        return
    parent, children = binomial_links(transport.rank, transport.world_size, source)
    if parent is not None:
        transport.receive_into(wire, parent).wait()
    wait_all([transport.send(wire, child) for child in children])


def binomial_links(rank: int, world_size: int, source: int = 0) -> tuple[int | None, list[int]]:
    """(whom a rank receives from, whom it then sends to) in a binomial tree with its root at `source`."""
    place = (rank - source) % world_size
    reach = 1 << place.bit_length()
    parent = (place - reach // 2 + source) % world_size if place else None
    children = []
    while place + reach < world_size:
        children.append((place + reach + source) % world_size)
        reach *= 2
    return parent, children
