"""Tensors from process to process, each with a header that says what it is.

Header, 64 bytes: type u8 | dimensions u8 | flags u16 | 4 zero bytes | up to 7 sizes u64. Flag 1: its gradient is wanted
back. Flag 2: there is no tensor (a gradient that is zero everywhere); nothing follows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from collectives.transport.base import Pending, Transport, TransportError

_HEADER = struct.Struct("<BBHI7Q")
_TYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_WANTS_GRADIENT, _ABSENT = 1, 2


def send_tensor(
    transport: Transport, tensor: torch.Tensor | None, to: int, *, wants_gradient: bool = False
) -> tuple[list[Pending], int]:
    """Start sending; the tensor must not change before every returned `Pending` is done.

    Returns:
        (what to wait for, bytes sent, the header included)

    Raises:
        TypeError: a type or number of dimensions that no network of ours has.
    """
    flags = _WANTS_GRADIENT * wants_gradient + _ABSENT * (tensor is None)
    shape: Sequence[int] = () if tensor is None else tensor.shape
    if len(shape) > 7 or (tensor is not None and tensor.dtype not in _TYPES):
        raise TypeError(f"a tensor of type {getattr(tensor, 'dtype', None)} and shape {list(shape)} cannot be sent")
    type_code = 0 if tensor is None else _TYPES.index(tensor.dtype)
    sizes = [*shape, *[0] * (7 - len(shape))]
    header = torch.frombuffer(bytearray(_HEADER.pack(type_code, len(shape), flags, 0, *sizes)), dtype=torch.uint8)
    sends = [(header, to)]
    if tensor is not None and tensor.numel():
        sends.append((tensor.detach().cpu().contiguous().view(-1).view(torch.uint8), to))
    return transport.post(sends, []), sum(part.nbytes for part, _ in sends)


def receive_tensor(transport: Transport, source: int, device: torch.device) -> tuple[torch.Tensor | None, bool]:
    """The next tensor from `source` and whether its gradient is wanted back.

    Raises:
        TransportError: the sender is lost, or what came is no tensor of ours.
    """
    header = torch.empty(_HEADER.size, dtype=torch.uint8)
    transport.receive_into(header, source).wait()
    code, dimensions, flags, zero, *sizes = _HEADER.unpack(header.numpy().tobytes())
    if code >= len(_TYPES) or dimensions > 7 or zero or flags > 3:
        raise TransportError(f"rank {transport.name(source)} sent what is no tensor", transport.name(source))
    if flags & _ABSENT:
        return None, False
    tensor = torch.empty(sizes[:dimensions], dtype=_TYPES[code])
    if tensor.numel():
        transport.receive_into(tensor.view(-1).view(torch.uint8), source).wait()
    return tensor.to(device), bool(flags & _WANTS_GRADIENT)
