"""Convert a `state_dict` to safetensors and back; reading a file from an unknown source cannot execute code.

Values are None, booleans, numbers, strings, tensors, and lists, tuples and dictionaries of these. The keys of a
dictionary are numbers, strings, or tuples of them. The metadata of the safetensors file holds all values as JSON, where
each tensor is replaced with its name, shape, strides and whether it was on a CPU.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load, save, save_file


def bits_hash(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash over the bits of all tensors, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class StateError(ValueError):
    """The given bytes are not a packed state."""


class PackedState:
    """A copy of a state, ready to be written: later changes of the state have no effect on it.

    Args:
        state: the state; its tensors are copied to the CPU.

    Raises:
        TypeError: a value is not None, a boolean, a number, a string, a real strided tensor, or a list, tuple or
            dictionary of these.
    """

    def __init__(self, state: Any) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._metadata = {"state": json.dumps(self._describe(state))}

    def save(self, path: Path) -> None:
        """Write the state to a file.

        Raises:
            OSError: the disk is full or the file cannot be written.
        """
        try:
            save_file(self._tensors, path, self._metadata)
        except safetensors.SafetensorError as error:
            if found := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
            raise

    def to_tensor(self) -> torch.Tensor:
        """Return the state as one tensor, uint8 [bytes], in safetensors format."""
        return torch.frombuffer(bytearray(save(self._tensors, self._metadata)), dtype=torch.uint8)

    def _describe(self, value: Any) -> Any:
        """Return a value in a form that JSON can store; tensors and containers become lists such as ["tuple", 1, 2]."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case torch.Tensor():
                if value.layout != torch.strided or value.is_complex():
                    raise TypeError(
                        f"a state with a tensor of type {value.dtype} and layout {value.layout} cannot be saved; "
                        "store a real tensor of layout torch.strided"
                    )
                copied = value.detach().to("cpu", copy=True)
                if not torch.ops.aten.is_non_overlapping_and_dense(copied):
                    copied = copied.contiguous()
                name = str(len(self._tensors))
                self._tensors[name] = copied.as_strided((copied.numel(),), (1,))  # safetensors knows no strides
                return ["tensor", name, list(copied.shape), list(copied.stride()), value.device.type == "cpu"]
            case Mapping():
                return ["dict", *([self._describe(key), self._describe(each)] for key, each in value.items())]
            case list():
                return ["list", *map(self._describe, value)]
            case tuple():
                return ["tuple", *map(self._describe, value)]
        raise TypeError(
            f"a state with a value of type {type(value).__name__} cannot be saved; use None, booleans, numbers, "
            "strings, tensors, and lists, tuples and dictionaries of these"
        )


def pack_state(state: Any) -> torch.Tensor:
    """Return the state as one tensor, uint8 [bytes], for checkpoints that hold only tensors."""
    return PackedState(state).to_tensor()


def unpack_state(packed: torch.Tensor) -> Any:
    """Return the state that `pack_state` packed, with all tensors on the CPU.

    Args:
        packed: uint8 [bytes].

    Raises:
        StateError: the bytes are not a packed state.
    """
    content = packed.numpy().tobytes()
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return _restored(header["__metadata__"], tensors.__getitem__, None)
    except (safetensors.SafetensorError, *_NOT_A_STATE) as error:
        raise StateError(f"these bytes are no packed state: {error}") from None


def load_state(path: Path, device: torch.device) -> Any:
    """Return the state that `PackedState.save` wrote.

    Args:
        path: the file.
        device: device of the tensors that were not on the CPU when packed.

    Raises:
        StateError: the file is not a packed state.
        OSError: the file cannot be read.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            return _restored(file.metadata(), file.get_tensor, device)
    except (safetensors.SafetensorError, *_NOT_A_STATE) as error:
        raise StateError(f"{path} is no packed state: {error}") from None


# the exceptions that a state of another form, or damaged bytes, may cause
_NOT_A_STATE = (ValueError, TypeError, KeyError, IndexError, RuntimeError, RecursionError)


def _restored(
    metadata: Mapping[str, str], tensor_named: Callable[[str], torch.Tensor], device: torch.device | None
) -> Any:
    def restored(description: Any) -> Any:
        match description:
            case ["tensor", str(name), shape, strides, was_on_cpu]:
                # The copy is aligned as tensors usually are: products of matrices depend on the alignment.
                tensor = tensor_named(name).as_strided(shape, strides).clone()
                return tensor if was_on_cpu or device is None else tensor.to(device)
            case ["dict", *items]:
                return {restored(key): restored(value) for key, value in items}
            case ["list", *items]:
                return [restored(item) for item in items]
            case ["tuple", *items]:
                return tuple(restored(item) for item in items)
            case list() | dict():
                raise ValueError("it holds a value of unknown kind")
        return description

    return restored(json.loads(metadata["state"]))
