"""Messages between a host and its devices: commands and reports (JSON preceded by its length), and tensors."""

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from collectives.transport.base import Pending, Purpose, Traffic, Transport, TransportError, wait_all

HOST_RANK = 0

_LENGTH = struct.Struct("<Q")
_LONGEST = 1 << 26


def tell(transport: Transport, to: int, value: Any) -> None:
    """Send a value as JSON to the rank `to`; return when the message has been sent."""
    text = json.dumps(value).encode()
    parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (_LENGTH.pack(len(text)), text)]
    with transport.counted_as("control"):
        wait_all(transport.post([(part, to) for part in parts], []))


def hear(transport: Transport, source: int) -> Any:
    """Receive a value that the rank `source` sent with `tell`, and return it.

    Raises:
        TransportError: the sender was lost, or the message did not come from `tell`.
    """
    (length,) = _LENGTH.unpack(receive_bytes(transport, source, _LENGTH.size).numpy().tobytes())
    if length > _LONGEST:
        name = transport.names[source]
        raise TransportError(f"rank {name} sent something that is not a command; start all processes again", name)
    return json.loads(receive_bytes(transport, source, length).numpy().tobytes())


def as_dicts(traffic: Mapping[Purpose, Traffic]) -> dict[Purpose, dict[str, Any]]:
    """Return the traffic of each purpose as a dict of values that JSON can store."""
    return {purpose: dataclasses.asdict(entry) for purpose, entry in traffic.items()}


def from_dicts(values: Mapping[Purpose, Mapping[str, Any]]) -> dict[Purpose, Traffic]:
    """Return the traffic of each purpose from the values that `as_dicts` returned."""
    return {purpose: Traffic(**entry) for purpose, entry in values.items()}


def send_all(transport: Transport, to: int, tensors: list[torch.Tensor]) -> None:
    """Send tensors whose shapes and types the receiver knows, such as a part of a replica."""
    with transport.counted_as("replicas"):
        wait_all([transport.send(_bytes(tensor), to) for tensor in tensors if tensor.numel()])


@torch.no_grad()
def receive_all_(transport: Transport, source: int, tensors: list[torch.Tensor]) -> None:
    """Overwrite tensors, in place, with those that the rank `source` sent with `send_all`."""
    for tensor in tensors:
        if tensor.numel():
            arrived = torch.empty(tensor.shape, dtype=tensor.dtype)
            transport.receive_into(_bytes(arrived), source).wait()
            tensor.copy_(arrived)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def receive_bytes(transport: Transport, source: int, nbytes: int) -> torch.Tensor:
    """Receive `nbytes` bytes and return them as uint8 [nbytes]."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        transport.receive_into(buffer, source).wait()
    return buffer


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
    """Start sending a tensor or None; the tensor must not change before every returned `Pending` is done.

    Args:
        transport: connects all processes.
        tensor: the tensor, on any device.
        to: the receiver's rank.
        wants_gradient: True to tell the receiver that this rank needs the gradient of the tensor.

    Returns:
        (sends to wait for, number of bytes sent including the header)

    Raises:
        TypeError: the tensor has more than 7 dimensions, or another dtype than those of `_TYPES`.
    """
    flags = _WANTS_GRADIENT * wants_gradient + _ABSENT * (tensor is None)
    shape: Sequence[int] = () if tensor is None else tensor.shape
    if len(shape) > 7 or (tensor is not None and tensor.dtype not in _TYPES):
        raise TypeError(
            f"a tensor of type {getattr(tensor, 'dtype', None)} and shape {list(shape)} cannot be sent between "
            f"devices; use at most 7 dimensions and one of {', '.join(map(str, _TYPES))}"
        )
    type_code = 0 if tensor is None else _TYPES.index(tensor.dtype)
    header = _HEADER.pack(type_code, len(shape), flags, 0, *shape, *[0] * (7 - len(shape)))
    sends = [(torch.frombuffer(bytearray(header), dtype=torch.uint8), to)]
    if tensor is not None and tensor.numel():
        sends.append((_bytes(tensor), to))
    return transport.post(sends, []), sum(part.nbytes for part, _ in sends)


def receive_tensor(transport: Transport, source: int, device: torch.device) -> tuple[torch.Tensor | None, bool]:
    """Receive a tensor or None that the rank `source` sent with `send_tensor`.

    Returns:
        (the tensor on `device`, or None if None was sent; True if the sender wants the tensor's gradient)

    Raises:
        TransportError: the sender was lost, or the message did not come from `send_tensor`.
    """
    header = receive_bytes(transport, source, _HEADER.size)
    code, dimensions, flags, zero, *sizes = _HEADER.unpack(header.numpy().tobytes())
    if code >= len(_TYPES) or dimensions > 7 or zero or flags > 3:
        name = transport.names[source]
        raise TransportError(f"rank {name} sent something that is not a tensor; start all processes again", name)
    if flags & _ABSENT:
        return None, False
    tensor = torch.empty(sizes[:dimensions], dtype=_TYPES[code])
    if tensor.numel():
        transport.receive_into(_bytes(tensor), source).wait()
    return tensor.to(device), bool(flags & _WANTS_GRADIENT)
