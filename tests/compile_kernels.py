"""Compile Triton's kernels for GPUs that need not be present: `python -m tests.compile_kernels`.

The tests' cases run up to the launch of each kernel, so that every kernel is compiled as it is used. No instruction may
be contracted, approximate or flush to zero.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from collectives.kernels.library import serving
from tests.testing.hard_numbers import hard_numbers
from tests.unit.compressors.test_triton import KERNELS

CAPABILITIES = (80, 90)
CASES = (*range(8), 10)
"""Numbers of the cases; one has no elements, and one has few."""
DRAWING = {"send_at", "send_drawn", "sparse"}
"""Cases that draw until all positions differ, which never happens here; they have no kernels of their own."""
ROUNDS_OTHERWISE = re.compile(r"\b(?:fma\.|div\.full|\w+(?:\.\w+)*\.(?:approx|ftz)\b)[\w.]*")


class Absent:
    """A driver for a GPU that is not present."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all() -> dict[str, int]:
    """Compile all kernels, and return the number of variants of each.

    Raises:
        AssertionError: a kernel has an instruction that rounds differently from the reference path.
    """
    variants: dict[str, set[str]] = {}
    run = JITFunction.run

    def compiled(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        code = run(kernel, *arguments, grid=grid, warmup=True, **constants).asm["ptx"]
        found = ROUNDS_OTHERWISE.findall(code)
        assert not found, f"{kernel.__name__} {constants}: {found}"
        variants.setdefault(kernel.__name__, set()).add(code)
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and not argument.is_floating_point():
                argument.zero_()  # it would have written counts and positions

    JITFunction.run = compiled
    for capability in CAPABILITIES:
        driver.set_active(Absent(capability))
        with serving("triton"):
            for name in KERNELS.keys() - DRAWING:
                for seed in CASES:
                    KERNELS[name](hard_numbers(seed), seed)
    return {name: len(codes) for name, codes in sorted(variants.items())}


if __name__ == "__main__":
    for name, count in compile_all().items():
        print(f"{name:20} {count:3} variants")
    sys.exit(0)
