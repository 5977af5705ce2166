"""Packed state: what a `state_dict` holds as bytes, and back: JSON that says what lies where, then the tensors.

Reading it runs no code, whoever wrote it. Values are None, truth values, numbers, texts, tensors, and lists, tuples and
dictionaries of these; a dictionary's keys are numbers, texts, or tuples of them.

Form: 8 bytes length of the JSON; the JSON; then each tensor's elements as they lie in memory, at multiples of 64 bytes
from the start.
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
    """Bytes that are no packed state."""


class PackedState:
    """A state that is to be written, as it is now.

    Args:
        state: tensors on the CPU are shared, not copied, unless asked for.
        copy: what becomes of the state later changes nothing of this.

    Raises:
        TypeError: a value of a kind that cannot be packed.
    """

    def __init__(self, state: Any, *, copy: bool = False) -> None:
        self._copy = copy
        self._tensors: list[torch.Tensor] = []
        self._were_on_cpu: list[bool] = []
        self._described = self._describe(state)

    def parts(self) -> list[memoryview]:
        """Return what is to be written, one part after the other."""
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
        """What JSON can hold of a value: lists begin with a word that says what they stand for."""
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
        """Keep a tensor whose elements lie side by side, and return its number."""
        if tensor.dtype not in _DTYPES.values():
            raise TypeError(f"a tensor of type {tensor.dtype} cannot be packed")
        on_cpu = tensor.to("cpu", copy=self._copy)
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(on_cpu)
        self._tensors.append(on_cpu if is_dense else on_cpu.contiguous())
        self._were_on_cpu.append(tensor.device.type == "cpu")
        return len(self._tensors) - 1


def pack_state(state: Any) -> torch.Tensor:
    """Return the state as one tensor, uint8 [bytes]: what a checkpoint that takes tensors can hold."""
    return torch.frombuffer(bytearray(b"".join(PackedState(state).parts())), dtype=torch.uint8)


def unpack_state(packed: torch.Tensor, device: torch.device | None = None) -> Any:
    """Return what was packed, in memory of its own.

    Args:
        packed: uint8 [bytes].
        device: where tensors go that were not on the CPU; the CPU where None.

    Raises:
        StateError: these bytes are no packed state.
    """
    try:
        (length,) = _LENGTH.unpack(packed[: _LENGTH.size].numpy().tobytes())
        told = json.loads(packed[_LENGTH.size : _LENGTH.size + length].numpy().tobytes())
        rest = packed[_LENGTH.size + length :]
        tensors = [_tensor(rest, device, *entry) for entry in told["tensors"]]
        return _restored(told["state"], tensors)
    except (struct.error, ValueError, TypeError, KeyError, IndexError, RuntimeError, RecursionError) as error:
        raise StateError(f"these bytes are no packed state: {error}") from None


def _restored(told: Any, tensors: list[torch.Tensor]) -> Any:
    match told:
        case ["tensor", int(index)]:
            return tensors[index]
        case ["dict", *items]:
            return {_restored(key, tensors): _restored(value, tensors) for key, value in items}
        case ["list", *items]:
            return [_restored(item, tensors) for item in items]
        case ["tuple", *items]:
            return tuple(_restored(item, tensors) for item in items)
        case list() | dict():
            raise ValueError("a value of no known kind")
    return told


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
        raise ValueError("a tensor is cut")
    flat = rest[start : start + nbytes].view(dtype)
    farthest = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if flat.numel() and (min(strides, default=0) < 0 or farthest >= flat.numel()):
        raise ValueError("a tensor reaches beyond its elements")
    tensor = torch.as_strided(flat.clone(), shape, strides)  # some of torch's calls take no part of a storage
    return tensor if was_on_cpu or device is None else tensor.to(device)
