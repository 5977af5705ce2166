"""The byte format of packed payloads: header, numbers of value dtypes, and functions to write and safely read fields.

Header, little endian: magic u16 | kind u8 | dtype u8 | flags u16 | tensor_id u16 | numel u32 | num_entries u32.
"""

import dataclasses
import itertools
import struct
from collections.abc import Sequence
from typing import Any

import torch


class PayloadError(ValueError):
    """A buffer is not a valid packed payload, tensors cannot form a payload, or payloads cannot be combined."""


MAGIC = 0x4757  # "WG" on the wire
HEADER = struct.Struct("<HBBHHII")
HEADER_BYTES = HEADER.size
MAX_NUMEL = 2**32 - 1

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

MEMORY = "memory_of_the_message"  # name of an attribute of the tensors that `with_room` returns


def field_nbytes(field: Field) -> int:
    """Return the number of bytes that a field of a payload takes in a message."""
    return len(field) if isinstance(field, bytes) else field.numel() * field.element_size()


def with_room(nbytes_before: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor, `dtype` [count], with `nbytes_before` bytes of free memory in front of it.

    The tensor is meant as the last field of a payload. `lay_out` writes the other fields into the free memory, so the
    long field is not copied. A view of the tensor is copied like any other field, because it may belong to another
    payload, which must not write into this memory.
    """
    memory = torch.empty(nbytes_before + count * dtype.itemsize, dtype=torch.uint8, device=device)
    field = memory[nbytes_before:].view(dtype)
    setattr(field, MEMORY, memory)
    return field


def lay_out(fields: Sequence[Field], device: torch.device) -> torch.Tensor:
    """Return the concatenated bytes of the fields, uint8 on `device`; a last field from `with_room` is not copied."""
    starts = list(itertools.accumulate(map(field_nbytes, fields), initial=0))
    out = getattr(fields[-1], MEMORY, None) if fields else None
    if out is not None and out.numel() == starts[-1]:
        fields = fields[:-1]
    else:
        out = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    if device.type == "cpu":  # creating a tensor for a few header bytes would be slow
        memory = out.numpy().data
        for field, (start, stop) in zip(fields, itertools.pairwise(starts), strict=False):
            memory[start:stop] = field if isinstance(field, bytes) else as_bytes(field).numpy().data
        return out
    for field, (start, stop) in zip(fields, itertools.pairwise(starts), strict=False):
        raw = torch.frombuffer(bytearray(field), dtype=torch.uint8) if isinstance(field, bytes) else as_bytes(field)
        out[start:stop] = raw
    return out


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes, uint8 1-D: a view if the tensor is contiguous, otherwise a copy."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@dataclasses.dataclass(eq=False)
class Reader:
    """Reads the fields of a message one after another; every method raises PayloadError if the message is too short.

    Attributes:
        message: the message, uint8 [any], contiguous.
        offset: number of bytes that have been read.
    """

    message: torch.Tensor
    offset: int = 0

    def numbers(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Return the next numbers of the message, which are packed as `layout`; padding bytes must be zero."""
        part = self._next(layout.size)
        raw = (self.message.numpy()[part] if self.message.is_cpu else self.message[part].cpu().numpy()).tobytes()
        numbers = layout.unpack(raw)
        if layout.pack(*numbers) != raw:
            raise PayloadError("a reserved field of a payload is not zero")
        return numbers

    def tensor(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next `count` elements of the message, `dtype` [count].

        The result is a view of the message if the message is aligned for the dtype, otherwise a copy. If the message is
        too short, nothing is allocated.
        """
        raw = self.message[self._next(count * dtype.itemsize)]
        if raw.storage_offset() % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype)

    def _next(self, nbytes: int) -> slice:
        left = self.message.numel() - self.offset
        if nbytes > left:
            raise PayloadError(f"the payload is cut short: {nbytes} more bytes are needed, {left} are left")
        start, self.offset = self.offset, self.offset + nbytes
        return slice(start, self.offset)
