"""Convert a `state_dict` to bytes and back, without pickle: reading bytes from an unknown source executes no code.

Values are None, booleans, numbers, strings, tensors, and lists, tuples and dictionaries of these. The keys of a
dictionary are numbers, strings, or tuples of them.

Format: the length of the JSON header in 8 bytes; the JSON header, which describes the values and where each tensor
lies; then the elements of each tensor in memory order, aligned to multiples of 64 bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch

ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16,
        torch.int32, torch.int64,
    )
}  # fmt: skip


class StateError(ValueError):
    """These bytes are not a packed state."""


class PackedState:
    """A state that is ready to be written.

    Args:
        state: the state; tensors on the CPU are shared with it unless `copy` is set.
        copy: copy all tensors, so that later changes of the state have no effect here.

    Raises:
        TypeError: a value has a type that cannot be packed.
    """

    def __init__(self, state: Any, *, copy: bool = False) -> None:
        self._copy = copy
        self._tensors: list[torch.Tensor] = []
        self._were_on_cpu: list[bool] = []
        self._described = self._describe(state)

    def parts(self) -> list[memoryview]:
        """Return the parts to write, in this order."""
        entries: list[list[Any]] = []
        end = 0
        for tensor, was_on_cpu in zip(self._tensors, self._were_on_cpu, strict=True):
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + tensor.nbytes
            name = str(tensor.dtype).removeprefix("torch.")
            entries.append([name, list(tensor.shape), list(tensor.stride()), start, was_on_cpu])
        text = json.dumps({"state": self._described, "tensors": entries}).encode()
        text += b" " * (-(_LENGTH.size + len(text)) % ALIGNMENT)
        parts = [memoryview(_LENGTH.pack(len(text)) + text)]
        end = 0
        for tensor, (*_, start, _) in zip(self._tensors, entries, strict=True):
            if tensor.nbytes:
                parts.append(memoryview(bytes(start - end)))
                flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                parts.append(flat.numpy().data)
                end = start + tensor.nbytes
        return parts

    def _describe(self, value: Any) -> Any:
        """Return a JSON description of a value; containers and tensors become lists that begin with their kind."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case torch.Tensor():
                return ["tensor", self._take(value.detach())]
            case Mapping():
                return ["dict", *([self._describe(key), self._describe(each)] for key, each in value.items())]
            case list():
                return ["list", *map(self._describe, value)]
            case tuple():
                return ["tuple", *map(self._describe, value)]
        raise TypeError(f"a value of type {type(value).__name__} cannot be packed")

    def _take(self, tensor: torch.Tensor) -> int:
        """Add a tensor, made dense in memory and moved to the CPU, and return its index."""
        if tensor.dtype not in _DTYPES.values():
            raise TypeError(f"a tensor of type {tensor.dtype} cannot be packed")
        on_cpu = tensor.to("cpu", copy=self._copy)
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(on_cpu)
        self._tensors.append(on_cpu if is_dense else on_cpu.contiguous())
        self._were_on_cpu.append(tensor.device.type == "cpu")
        return len(self._tensors) - 1


def pack_state(state: Any) -> torch.Tensor:
    """Return the state as one tensor, uint8 [bytes], for checkpoints that hold only tensors."""
    return torch.frombuffer(bytearray(b"".join(PackedState(state).parts())), dtype=torch.uint8)


def unpack_state(packed: torch.Tensor, device: torch.device | None = None) -> Any:
    """Return the state that was packed; its tensors do not share memory with `packed`.

    Args:
        packed: uint8 [bytes].
        device: device of the tensors that were not on the CPU when packed; None: the CPU.

    Raises:
        StateError: the bytes are not a packed state.
    """
    try:
        (length,) = _LENGTH.unpack(packed[: _LENGTH.size].numpy().tobytes())
        header = json.loads(packed[_LENGTH.size : _LENGTH.size + length].numpy().tobytes())
        rest = packed[_LENGTH.size + length :]
        tensors = [_tensor(rest, device, *entry) for entry in header["tensors"]]
        return _restored(header["state"], tensors)
    except (struct.error, ValueError, TypeError, KeyError, IndexError, RuntimeError, RecursionError) as error:
        raise StateError(f"these bytes are no packed state: {error}") from None


def _restored(description: Any, tensors: list[torch.Tensor]) -> Any:
    match description:
        case ["tensor", int(index)]:
            return tensors[index]
        case ["dict", *items]:
            return {_restored(key, tensors): _restored(value, tensors) for key, value in items}
        case ["list", *items]:
            return [_restored(item, tensors) for item in items]
        case ["tuple", *items]:
            return tuple(_restored(item, tensors) for item in items)
        case list() | dict():
            raise ValueError("a value of unknown kind")
    return description


def _tensor(
    rest: torch.Tensor,
    device: torch.device | None,
    name: str,
    shape: list[int],
    strides: list[int],
    start: int,
    was_on_cpu: bool,
) -> torch.Tensor:
    dtype = _DTYPES[name]
    nbytes = math.prod(shape) * dtype.itemsize
    if start < 0 or start % ALIGNMENT or start + nbytes > rest.numel():
        raise ValueError("a tensor is cut off")
    flat = rest[start : start + nbytes].view(dtype)
    farthest = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if flat.numel() and (min(strides, default=0) < 0 or farthest >= flat.numel()):
        raise ValueError("a tensor reaches beyond its elements")
    tensor = torch.as_strided(flat.clone(), shape, strides)  # cloned: some functions of torch need a whole storage
    return tensor if was_on_cpu or device is None else tensor.to(device)
