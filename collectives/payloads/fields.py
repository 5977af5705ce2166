"""The bytes of a packed payload: value types by number, fields laid end to end and read back with lengths checked."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import torch


class PayloadError(ValueError):
    """A buffer that is not a valid packed payload, or payloads that do not belong together."""


VALUE_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
FLOAT_DTYPES = VALUE_DTYPES[:4]

Field = bytes | torch.Tensor

MEMORY = "memory_of_the_message"
"""attribute of a tensor that was made by `with_room`"""


def field_nbytes(field: Field) -> int:
    """Bytes that a field takes on the wire."""
    return len(field) if isinstance(field, bytes) else field.numel() * field.element_size()


def with_room(nbytes_before: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A last field to be filled, `dtype` [count], in memory that has room for exactly the fields before it.

    `lay_out` then writes those into the room, and the long field is not copied. Views of it are copied as any field is:
    other payloads may be made of them, which must not write here.
    """
    memory = torch.empty(nbytes_before + count * dtype.itemsize, dtype=torch.uint8, device=device)
    field = memory[nbytes_before:].view(dtype)
    setattr(field, MEMORY, memory)
    return field


def lay_out(fields: Sequence[Field], device: torch.device) -> torch.Tensor:
    """uint8 [sum of lengths] on `device`: the fields end to end, each copied once, but a last one `with_room` not."""
    starts = list(itertools.accumulate(map(field_nbytes, fields), initial=0))
    out = getattr(fields[-1], MEMORY, None) if fields else None
    if out is not None and out.numel() == starts[-1]:
        fields = fields[:-1]
    else:
        out = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    stops = starts[1:]
    if device.type == "cpu":  # without a tensor around every few bytes of a header
        memory = out.numpy().data
        for field, start, stop in zip(fields, starts, stops, strict=False):
            memory[start:stop] = field if isinstance(field, bytes) else as_bytes(field).numpy().data
        return out
    for field, start, stop in zip(fields, starts, stops, strict=False):
        raw = torch.frombuffer(bytearray(field), dtype=torch.uint8) if isinstance(field, bytes) else as_bytes(field)
        out[start:stop] = raw
    return out


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as uint8, 1-D; shared where the tensor is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor, part: slice) -> bytes:
    """A few bytes of a message, uint8 [any], or as many of them as there are; on a CPU no tensor is made for them."""
    return (tensor.numpy()[part] if tensor.is_cpu else tensor[part].cpu().numpy()).tobytes()


class Reader:
    """Takes one field after the other from a received body; what is not there raises instead of being read."""

    def __init__(self, body: torch.Tensor) -> None:
        """Start at the first byte of `body`, uint8 [any], contiguous."""
        self._body = body
        self._offset = 0

    def fields(self, layout: struct.Struct) -> tuple[int | float, ...]:
        """The next fixed fields.

        Raises:
            PayloadError: the body ends before them.
        """
        return layout.unpack(bytes_of(self._body, self._next(layout.size)))

    def tensor(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `count` elements, 1-D: a view of the body where it is aligned for the type, else a copy.

        Raises:
            PayloadError: the body ends before them; nothing is allocated.
        """
        raw = self._body[self._next(count * dtype.itemsize)]
        if raw.storage_offset() % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype)

    def _next(self, nbytes: int) -> slice:
        left = self._body.numel() - self._offset
        if nbytes > left:
            raise PayloadError(f"the payload is cut short: {nbytes} more bytes were promised, {left} are there")
        start, self._offset = self._offset, self._offset + nbytes
        return slice(start, self._offset)
