"""One entry point for every device: where tensors lie on a GPU, a function's twin in Triton does the same there."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from collectives.kernels.library import kernels_in_use
from collectives.kernels.parts import Parts

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
