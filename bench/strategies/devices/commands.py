"""What a host and its devices say to each other beside tensors: commands and reports, as JSON behind their length."""

from __future__ import annotations

import json
import struct
from typing import Any, Literal

import torch

from collectives.transport.base import Pending, Transport, TransportError, wait_all

Command = Literal["load", "batch", "reduce", "report", "checkpoint", "stop"]
HOST_RANK = 0

_LENGTH = struct.Struct("<Q")
_LONGEST = 1 << 26


def tell(transport: Transport, to: int, value: Any) -> None:
    """Send what JSON knows; returns when it is on its way and nothing of it is needed any more."""
    text = json.dumps(value).encode()
    parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (_LENGTH.pack(len(text)), text)]
    with transport.counted_as("control"):
        wait_all(transport.post([(part, to) for part in parts], []))


def hear(transport: Transport, source: int) -> Any:
    """What `tell` sent.

    Raises:
        TransportError: the sender is lost, or what came is nothing that it says.
    """
    length = _LENGTH.unpack(_receive(transport, source, _LENGTH.size))[0]
    if length > _LONGEST:
        raise TransportError(f"rank {transport.name(source)} sent what is no command", transport.name(source))
    return json.loads(_receive(transport, source, length))


def send_all(transport: Transport, to: int, tensors: list[torch.Tensor]) -> None:
    """Send fp32 and other tensors whose shapes the receiver knows: a part of a replica."""
    with transport.counted_as("replicas"):
        pendings: list[Pending] = []
        for tensor in tensors:
            if tensor.numel():
                pendings.append(transport.send(_bytes(tensor.detach().cpu().contiguous()), to))
        wait_all(pendings)


@torch.no_grad()
def receive_all_(transport: Transport, source: int, tensors: list[torch.Tensor]) -> None:
    """Overwrite tensors by what `send_all` sent."""
    for tensor in tensors:
        if tensor.numel():
            arrived = torch.empty(tensor.shape, dtype=tensor.dtype)
            transport.receive_into(_bytes(arrived), source).wait()
            tensor.copy_(arrived)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _receive(transport: Transport, source: int, nbytes: int) -> bytes:
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        transport.receive_into(buffer, source).wait()
    return buffer.numpy().tobytes()
