"""Compare size, time and accuracy of sending a symmetric matrix whole, as its triangle and as its Cholesky factor.

Everything runs in one process on one thread, without a network. `to send` is the time from the matrix to packed bytes,
`to receive` the time from these bytes to the matrix, and `to solve` the time from them to the factor that a solve
needs, which the receiver computes unless it was sent. Times are medians.

`error` (relative, in the Frobenius norm) and `lowest` (eigenvalue) describe the restored matrix, which is L L^T for a
factor. The sent matrix has eigenvalues from 1e-6 to 1.

    python benchmarks/factor_transfer.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from collectives.payloads import CholeskyFactor, unpack
from collectives.payloads.symmetric import MatrixForm, encode_symmetric

SIZES = (64, 256, 1024)
FORMS: tuple[MatrixForm, ...] = ("dense", "triangle", "cholesky")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONDITION = 1e6
DAMPING = 1e-3  # of the factor that `to solve` computes, as in a preconditioner


def matrix_of(size: int) -> torch.Tensor:
    """Return a symmetric matrix, fp64 [size, size], with logarithmically spaced eigenvalues from 1e-6 to 1."""
    generator = torch.Generator().manual_seed(size)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    eigenvalues = torch.logspace(0, -6, size, dtype=torch.float64)
    return (basis * eigenvalues) @ basis.T


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]) * 1e3  # the first ones fill allocators


def received(packed: torch.Tensor, size: int) -> torch.Tensor:
    return unpack(packed).to_dense().view(size, size)


def factor_of(packed: torch.Tensor, size: int) -> torch.Tensor:
    payload = unpack(packed)
    if isinstance(payload, CholeskyFactor):
        return payload.factor
    return torch.linalg.cholesky(payload.to_dense().view(size, size) + DAMPING * torch.eye(size))


def row(size: int, precision: str, form: MatrixForm, repeats: int) -> list[str]:
    exact, dtype = matrix_of(size), DTYPES[precision]
    single = exact.float()
    single = (single + single.T) / 2
    packed = encode_symmetric(single, form, dtype=dtype, damping=DAMPING).payload.pack()
    times = (
        milliseconds(lambda: encode_symmetric(single, form, dtype=dtype, damping=DAMPING).payload.pack(), repeats),
        milliseconds(lambda: received(packed, size), repeats),
        milliseconds(lambda: factor_of(packed, size), repeats),
    )
    restored = encode_symmetric(exact, form, dtype=dtype).payload  # of the undamped matrix
    matrix = restored.factor.double() @ restored.factor.double().T if isinstance(restored, CholeskyFactor) else None
    if matrix is None:
        matrix = restored.to_dense().view(size, size).double()
    error = float((matrix - exact).norm() / exact.norm())
    lowest = float(torch.linalg.eigvalsh(matrix).min())
    share = packed.numel() / (16 + 4 * size**2)
    return [str(size), precision, form, f"{packed.numel():,}", f"{share:.4f}", *(f"{t:.2f}" for t in times),
            f"{error:.1e}", f"{lowest:+.1e}"]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("d", "values", "sent as", "bytes", "of dense fp32", "to send, ms", "to receive, ms", "to solve, ms",
                  "error", "lowest")  # fmt: skip
    for size, precision, form in itertools.product(SIZES, DTYPES, FORMS):
        table.add_row(*row(size, precision, form, options.repeats))
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
