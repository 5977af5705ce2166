"""A native loop as a Python function: tensors in, checked for type and layout, and the interpreter's lock released."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch

from collectives.kernels.library import kernels_in_use, library

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


FloatArray = array(torch.float32)
DoubleArray = array(torch.float64)
IntArray = array(torch.int32)
LongArray = array(torch.int64)
ByteArray = array(torch.uint8)


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


class Parts:
    """One tensor in several pieces of memory.

    Args:
        tensors: fp32 and 1-D, at least one; made contiguous where they are not.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.contiguous() for tensor in tensors]
        self.numel = sum(tensor.numel() for tensor in tensors)
        self.device = tensors[0].device

    @functools.cached_property
    def flat(self) -> torch.Tensor:
        """All as one tensor, fp32 [numel]; a single one itself."""
        return self.tensors[0] if len(self.tensors) == 1 else torch.cat(self.tensors)

    @functools.cached_property
    def starts(self) -> Any:
        """Addresses of the parts, for an argument of a loop that is `Longs`."""
        return longs([tensor.data_ptr() for tensor in self.tensors])

    @functools.cached_property
    def borders(self) -> Any:
        """Where each part begins, counted over all, and the end; likewise."""
        return longs([0, *itertools.accumulate(tensor.numel() for tensor in self.tensors)])


P = ParamSpec("P")
T = TypeVar("T")


def also_on_gpus(function: Callable[P, T]) -> Callable[P, T]:
    """Call the function of the same name and arguments in `triton/`, beside its module, where Triton serves.

    The first argument that is a tensor, parts of one or a device says where that is. The module is imported at the
    first such call.
    """
    package, _, module = function.__module__.rpartition(".")

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        device = _device_of(args)
        if kernels_in_use(device.type) != "triton":
            return function(*args, **kwargs)
        twin = cast(Callable[P, T], getattr(importlib.import_module(f"{package}.triton.{module}"), function.__name__))
        with torch.cuda.device(device if device.type == "cuda" else -1):  # of this thread; -1 for none
            return twin(*args, **kwargs)

    return wrapper


def launch(kernel: Any, num_programs: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel of Triton, with no product and sum contracted into one rounding; not at all for no programs."""
    if num_programs:
        kernel[(num_programs,)](*arguments, **constants, enable_fp_fusion=False)


def _device_of(args: tuple[object, ...]) -> torch.device:
    for argument in args:
        if isinstance(argument, torch.Tensor | Parts):
            return argument.device
        if isinstance(argument, torch.device):
            return argument
    raise TypeError("neither a tensor nor a device among the arguments")
