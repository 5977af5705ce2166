"""Pack payloads for a transport, limit the length of messages, broadcast messages, and sum received tensors."""

from collections.abc import Callable, Sequence

import torch

from collectives.payloads.base import HEADER_BYTES, Payload, PayloadError
from collectives.payloads.codec.values import SHORT, lost_in_sum, to_value_dtype
from collectives.transport.base import ReduceOp, Transport, wait_all

_WIDEST_ELEMENT = 8
_PER_LEAF = 4 * HEADER_BYTES
_SPARE_LEAVES = 1024


def bound_nbytes(numel: int, num_leaves: int) -> int:
    """Return an upper bound, in bytes, for a packed payload or sum; every rank can compute it without communication.

    A payload is at most as long as all its elements, a bitmap, headers and fixed fields together. A sum may consist of
    more pieces than the payload. A generous bound costs nothing, because memory that no message fills is never touched.

    Args:
        numel: number of elements of the payload.
        num_leaves: number of payloads in the bundle; 1 if the payload is not a bundle.
    """
    return (_WIDEST_ELEMENT + 1) * numel + _PER_LEAF * (num_leaves + _SPARE_LEAVES)


def pack(payload: Payload, transport: Transport, bound: int | None = None) -> torch.Tensor:
    """Return a payload packed for sending: uint8 1-D on the transport's device.

    Args:
        payload: the payload to send.
        transport: the transport that will send it.
        bound: size of the receivers' buffers in bytes; None if the length is sent to the receivers first.

    Raises:
        PayloadError: the message is longer than `bound`, so it would end a gloo process that receives it.
    """
    packed = payload.pack().to(transport.device)
    if bound is not None and packed.numel() > bound:
        raise PayloadError(
            f"a {type(payload).__name__} of {packed.numel()} bytes is longer than the {bound} bytes that its "
            f"{payload.numel} elements can need; all ranks must sum payloads of one kind and length"
        )
    return packed


def broadcast_bytes(transport: Transport, message: torch.Tensor | None, source: int) -> torch.Tensor:
    """Broadcast a message from rank `source` along a binomial tree. Every rank must call this function.

    The message's length is sent first, as 8 bytes of control traffic.

    Args:
        transport: connects the ranks.
        message: the message, uint8 1-D, on rank `source`; None on other ranks.
        source: the rank that has the message.

    Returns:
        The message, uint8 1-D; on rank `source`, the argument itself.

    Raises:
        PayloadError: `message` is None on rank `source`.
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
    """Broadcast a tensor of known length from rank `source` along a binomial tree. Every rank must call this function.

    Args:
        transport: connects the ranks.
        wire: 1-D, contiguous, of the same length and dtype on all ranks; overwritten except on rank `source`.
        source: the rank that has the values.
    """
    if not wire.numel():
        return
    parent, children = binomial_links(transport.rank, transport.world_size, source)
    if parent is not None:
        transport.receive_into(wire, parent).wait()
    wait_all([transport.send(wire, child) for child in children])


def binomial_links(rank: int, world_size: int, source: int = 0) -> tuple[int | None, list[int]]:
    """Return a rank's parent (None for the root) and its children in a binomial tree whose root is rank `source`."""
    place = (rank - source) % world_size
    reach = 1 << place.bit_length()
    parent = (place - reach // 2 + source) % world_size if place else None
    children = []
    while place + reach < world_size:
        children.append((place + reach + source) % world_size)
        reach *= 2
    return parent, children


Lost = Callable[[torch.Tensor], None]  # called with the rounding error of each element of a sum, fp32


def combine_(into: torch.Tensor, incoming: torch.Tensor, op: ReduceOp = "sum", lost: Lost | None = None) -> None:
    """Replace `into`, element by element, with `into + incoming` or with the maximum of the two.

    16-bit floats are added in fp32 and rounded once; a sum beyond their range becomes the largest finite number of its
    sign. Integers wrap. NaN stays NaN in sums and maxima. `lost` is called with the rounding errors of 16-bit sums.
    """
    if op == "max":
        torch.maximum(into, incoming, out=into)
        return
    before = into.clone() if lost is not None and into.dtype in SHORT else None
    into.add_(incoming)
    if into.dtype in SHORT:
        limit = torch.finfo(into.dtype).max
        into.clamp_(-limit, limit)
    if lost is not None and before is not None:
        lost(lost_in_sum(before, incoming, into))


def sum_wires(
    wires: Sequence[torch.Tensor], op: ReduceOp = "sum", *, out: torch.Tensor | None = None, lost: Lost | None = None
) -> torch.Tensor:
    """Return the sum or maximum of all ranks' tensors, combined in rank order.

    16-bit floats are added in fp32 and rounded once.

    Args:
        wires: one tensor per rank, in rank order, all of the same length and dtype.
        op: "sum" or "max".
        out: the tensor to write into and return, of the same length and dtype; must not overlap `wires[2:]`. None for a
            new tensor.
        lost: called with the rounding errors, fp32, of 16-bit sums of two or more tensors.
    """
    out = torch.empty_like(wires[0]) if out is None else out
    if len(wires) == 1:
        return out.copy_(wires[0])
    if out.dtype not in SHORT:
        (torch.maximum if op == "max" else torch.add)(wires[0], wires[1], out=out)
        for wire in wires[2:]:
            combine_(out, wire, op)
        return out
    total = wires[0].float()
    for wire in wires[1:]:
        combine_(total, wire.float(), op)
    to_value_dtype(total, out.dtype, out=out)
    if lost is not None and op == "sum":
        lost(total.sub_(out))
    return out
