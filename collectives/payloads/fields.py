"""The byte format of packed payloads: numbers of value types, writing of fields, and reading with checked lengths."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import torch


class PayloadError(ValueError):
    """A buffer is not a valid packed payload, or payloads do not fit together."""


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

MEMORY = "memory_of_the_message"  # attribute of tensors that `with_room` returned


def field_nbytes(field: Field) -> int:
    """Return the bytes that a field takes on the wire."""
    return len(field) if isinstance(field, bytes) else field.numel() * field.element_size()


def with_room(nbytes_before: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised last field, `dtype` [count], with free memory in front of it for the other fields.

    `lay_out` writes the other fields there, so that the long field is not copied. Views of the field are copied like
    any field, because they may belong to other payloads, which must not write into this memory.
    """
    memory = torch.empty(nbytes_before + count * dtype.itemsize, dtype=torch.uint8, device=device)
    field = memory[nbytes_before:].view(dtype)
    setattr(field, MEMORY, memory)
    return field


def lay_out(fields: Sequence[Field], device: torch.device) -> torch.Tensor:
    """Concatenate fields into uint8 [sum of lengths] on `device`; a last field made by `with_room` is not copied."""
    starts = list(itertools.accumulate(map(field_nbytes, fields), initial=0))
    out = getattr(fields[-1], MEMORY, None) if fields else None
    if out is not None and out.numel() == starts[-1]:
        fields = fields[:-1]
    else:
        out = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    stops = starts[1:]
    if device.type == "cpu":  # creating a tensor for a few header bytes would be slow
        memory = out.numpy().data
        for field, start, stop in zip(fields, starts, stops, strict=False):
            memory[start:stop] = field if isinstance(field, bytes) else as_bytes(field).numpy().data
        return out
    for field, start, stop in zip(fields, starts, stops, strict=False):
        raw = torch.frombuffer(bytearray(field), dtype=torch.uint8) if isinstance(field, bytes) else as_bytes(field)
        out[start:stop] = raw
    return out


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as uint8, 1-D; shared if the tensor is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor, part: slice) -> bytes:
    """Return part of a message, uint8 [any], as bytes; fewer if the message ends before. On a CPU by numpy alone."""
    return (tensor.numpy()[part] if tensor.is_cpu else tensor[part].cpu().numpy()).tobytes()


class Reader:
    """Reads one field after another from a received body and raises if the body is too short."""

    def __init__(self, body: torch.Tensor) -> None:
        """Read from `body`, uint8 [any], contiguous."""
        self._body = body
        self._offset = 0

    def fields(self, layout: struct.Struct) -> tuple[int | float, ...]:
        """Read the next fixed fields.

        Raises:
            PayloadError: the body ends before them.
        """
        return layout.unpack(bytes_of(self._body, self._next(layout.size)))

    def tensor(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Read the next `count` elements, 1-D: a view of the body if it is aligned for the type, else a copy.

        Raises:
            PayloadError: the body ends before them; raised before any memory is allocated.
        """
        raw = self._body[self._next(count * dtype.itemsize)]
        if raw.storage_offset() % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype)

    def _next(self, nbytes: int) -> slice:
        left = self._body.numel() - self._offset
        if nbytes > left:
            raise PayloadError(f"the payload is cut short: {nbytes} more bytes are needed, {left} are left")
        start, self._offset = self._offset, self._offset + nbytes
        return slice(start, self._offset)
