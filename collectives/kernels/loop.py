"""A native loop as a Python function: tensors in, checked for type and layout, and the interpreter's lock released."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from collectives.kernels.library import library

Int = ctypes.c_int64
Float = ctypes.c_float
Double = ctypes.c_double
Longs = ctypes.POINTER(Int)


def longs(values: Sequence[int]) -> Any:
    """A few numbers or addresses for an argument that is `Longs`: made in a fraction of the time of a tensor."""
    return (Int * len(values))(*values)


@functools.cache
def array(*dtypes: torch.dtype) -> Any:
    """The argument type of a pointer to a tensor's first element, for `Loop`: CPU, contiguous, one of these dtypes."""

    def from_param(tensor: torch.Tensor) -> ctypes.c_void_p:
        if tensor.dtype not in dtypes or not tensor.is_cpu or not tensor.is_contiguous():
            raise TypeError(
                f"a native loop wants a contiguous CPU tensor of {' or '.join(map(str, dtypes))}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
        return ctypes.c_void_p(tensor.data_ptr())

    return type("array", (), {"from_param": staticmethod(from_param)})


class Loop:
    """One function of the library of native loops.

    Args:
        name: of the C function.
        argtypes: `Int`, `Float`, `Double` or `array(dtype)` for each argument.
        returns: a ctypes type; None for nothing.
    """

    def __init__(self, name: str, *argtypes: Any, returns: Any = None) -> None:
        self._name = name
        self._argtypes = argtypes
        self._returns = returns

    def __call__(self, *arguments: Any) -> Any:
        """Call it.

        Raises:
            TypeError: a tensor that the loop cannot take.
        """
        return self._function(*arguments)

    def serves(self, *tensors: torch.Tensor) -> bool:
        """Whether native loops are in use, and these tensors lie where they can be reached."""
        return library() is not None and all(tensor.is_cpu for tensor in tensors)

    @functools.cached_property
    def _function(self) -> Any:
        handle = library()
        assert handle is not None, "ask serves() first"
        function = handle[self._name]  # unlike the attribute, a function object of its own
        function.argtypes, function.restype = self._argtypes, self._returns
        return function
