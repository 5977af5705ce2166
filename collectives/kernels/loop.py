"""Call native loops in C and Triton kernels from Python; a call of a C loop checks its tensors and releases the GIL."""

import ctypes
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch

from collectives.kernels.library import kernels_in_use, library

Int = ctypes.c_int64
Float = ctypes.c_float
Double = ctypes.c_double
Longs = ctypes.POINTER(Int)


def longs(values: Sequence[int]) -> Any:
    """Return numbers or addresses as a C array of 64-bit integers, for an argument of type `Longs` of a native loop."""
    return (Int * len(values))(*values)


def addresses(tensors: Iterable[torch.Tensor]) -> Any:
    """Return the address of each tensor's first element, as a C array for a `Longs` argument."""
    return longs([tensor.data_ptr() for tensor in tensors])


@functools.cache
def array(*dtypes: torch.dtype) -> Any:
    """Return an argument type for `Loop` that accepts contiguous CPU tensors with one of these dtypes."""

    def from_param(tensor: torch.Tensor) -> ctypes.c_void_p:
        if tensor.dtype not in dtypes or not tensor.is_cpu or not tensor.is_contiguous():
            raise TypeError(
                f"a native loop needs a contiguous CPU tensor of {' or '.join(map(str, dtypes))}, "
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
    """A C function in the library of native loops, callable from Python.

    Args:
        name: name of the C function.
        argtypes: `Int`, `Float`, `Double`, `Longs` or `array(dtype)` for each argument.
        returns: ctypes type of the result; None if the function returns nothing.
    """

    def __init__(self, name: str, *argtypes: Any, returns: Any = None) -> None:
        self._name = name
        self._argtypes = argtypes
        self._returns = returns

    def __call__(self, *arguments: Any) -> Any:
        """Call the C function and return its result.

        Raises:
            TypeError: a tensor has the wrong dtype, is not contiguous, or does not lie on the CPU.
        """
        return self._function(*arguments)

    def serves(self, *tensors: torch.Tensor) -> bool:
        """Return True if native loops are in use and all these tensors lie on the CPU, so the loop can be called."""
        return library() is not None and all(tensor.is_cpu for tensor in tensors)

    @functools.cached_property
    def _function(self) -> Any:
        handle = library()
        assert handle is not None, "ask serves() first"
        function = handle[self._name]  # a new function object each time, unlike getattr
        function.argtypes, function.restype = self._argtypes, self._returns
        return function


class Parts:
    """A sequence of tensors that is used as one flat tensor, the concatenation of these tensors.

    Args:
        tensors: fp32 and 1-D, at least one; a tensor that is not contiguous is copied.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor.contiguous() for tensor in tensors]
        self._numels = [tensor.numel() for tensor in tensors]
        self.numel = sum(self._numels)
        self.device = tensors[0].device

    @functools.cached_property
    def flat(self) -> torch.Tensor:
        """Return the concatenation of the tensors, fp32 [numel]; a single tensor is returned without a copy."""
        return self.tensors[0] if len(self.tensors) == 1 else torch.cat(self.tensors)

    @functools.cached_property
    def starts(self) -> Any:
        """Return the address of each tensor's first element, as a C array for a `Longs` argument."""
        return addresses(self.tensors)

    @functools.cached_property
    def borders(self) -> Any:
        """Return the index of each tensor's first element in the concatenation, then `numel`, as a C array."""
        return longs([0, *itertools.accumulate(self._numels)])


P = ParamSpec("P")
T = TypeVar("T")


def also_on_gpus(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls `function`, or its Triton version if the arguments' device uses Triton.

    The Triton version has the same name and is in `triton.py` or `triton/<module>.py` next to the function's module.
    The device is taken from the first argument that is a tensor, a `Parts` or a device. The Triton module is imported
    at the first call that needs it.
    """
    package, _, module = function.__module__.rpartition(".")
    has_twin = importlib.util.find_spec(f"{package}.triton") is not None  # the kernels for GPUs may be left out

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        device = _device_of(args)
        if not has_twin or kernels_in_use(device.type) != "triton":
            return function(*args, **kwargs)
        twins = importlib.import_module(f"{package}.triton")
        if hasattr(twins, "__path__"):  # a folder, with one module for each module of the package
            twins = importlib.import_module(f"{package}.triton.{module}")
        twin = cast(Callable[P, T], getattr(twins, function.__name__))
        with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: leave the current device as it is
            return twin(*args, **kwargs)

    return wrapper


def launch(kernel: Any, num_programs: int, *arguments: Any, **constants: Any) -> None:
    """Run `num_programs` programs of a Triton kernel; if the number is 0, do nothing.

    Fused multiply-add is off, so that results match those of the CPU.

    Args:
        kernel: the function compiled by `triton.jit`.
        num_programs: number of programs.
        arguments: the kernel's arguments.
        constants: the kernel's compile-time constants.
    """
    if num_programs:
        kernel[(num_programs,)](*arguments, **constants, enable_fp_fusion=False)


def _device_of(args: tuple[object, ...]) -> torch.device:
    for argument in args:
        if isinstance(argument, torch.Tensor | Parts):
            return argument.device
        if isinstance(argument, torch.device):
            return argument
    raise TypeError("pass at least one tensor or torch.device, which says on which device the loop runs")
