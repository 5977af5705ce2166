"""One payload of every kind at a given length, with its dense tensor, computed independently."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from collectives.payloads import (
    Bundle,
    CholeskyFactor,
    Codes,
    Dense,
    GroupSparse,
    RowSparse,
    Seeded,
    Sparse,
    SparseCodes,
    SparseLevels,
    Triangle,
)
from collectives.payloads.base import Payload
from collectives.payloads.codec.bits import find_codebook, pack_bits
from collectives.payloads.codec.philox import seeded_positions
from collectives.payloads.codec.value_codes import ValueCoding, bits_of_code, block_length, table_dtype, table_length
from collectives.payloads.codes import TwoMeans
from collectives.schedule.rounds import Layout

LENGTHS = (0, 1, 2, 3, 7, 8, 9, 63, 1023, 1024, 1025)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@dataclasses.dataclass
class Example:
    """A payload, its dense fp32 tensor, and a mask of the transmitted elements (bool, same length)."""

    payload: Payload
    dense: torch.Tensor
    sent: torch.Tensor


def values_like_gradients(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return non-zero values that the type represents exactly; sums of a few are in its range."""
    x = torch.randn(count, generator=generator)
    return torch.where(x == 0, 1.0, x).to(dtype)


def dense_example(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Example:
    values = values_like_gradients(numel, dtype, generator)
    return Example(Dense(values), values.float(), torch.ones(numel, dtype=torch.bool))


def sparse_example(
    numel: int, dtype: torch.dtype, generator: torch.Generator, density: float = 0.1, payload: type[Sparse] = Sparse
) -> Example:
    count = min(numel, math.ceil(numel * density))
    indices = torch.randperm(numel, generator=generator)[:count].sort().values
    values = values_like_gradients(count, dtype, generator)
    dense, sent = _scattered(numel, indices, values)
    return Example(payload(numel, indices, values), dense, sent)


def sparse_levels_example(
    numel: int, dtype: torch.dtype, generator: torch.Generator, low: float = 0.25, ratio: float = 1.5
) -> Example:
    count = math.ceil(numel / 10)
    indices = torch.randperm(numel, generator=generator)[:count].sort().values
    codes = torch.randint(16, (count,), generator=generator)
    values = low * ratio ** (codes % 8) * torch.where(codes < 8, 1, -1)  # 1.5^7 has 12 bits: exact in fp32
    dense, sent = _scattered(numel, indices, values)
    return Example(SparseLevels(numel, indices, low, ratio, pack_bits(codes, 4)), dense, sent)


def sparse_codes_example(
    numel: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    coding: ValueCoding = "two_magnitudes",
    group_size: int = 64,
    k: int = 3,
) -> Example:
    groups = group_sparse_example(numel, dtype, generator, group_size, k).payload
    count, positions = groups.num_entries, groups.positions  # type: ignore[attr-defined]
    shared = torch.rand(table_length(coding, count, numel), generator=generator) + 0.5
    codes = torch.randint(4 if bits_of_code(coding) == 2 else 256, (count,), generator=generator)
    packed, tables = pack_bits(codes, bits_of_code(coding)), shared.to(table_dtype(coding))
    blocks = torch.arange(count) // block_length(coding, count, numel)
    if coding == "two_magnitudes":
        values = tables.float()[2 * blocks + codes // 2] * (1 - 2 * (codes % 2))
    elif coding == "sigma":
        values = tables[codes]
    else:
        values = tables[blocks] * torch.where(codes < 128, codes, codes - 256)
    dense, sent = _scattered(numel, positions, values)
    return Example(SparseCodes(numel, group_size, k, positions, coding, tables, packed), dense, sent)


def group_sparse_example(
    numel: int, dtype: torch.dtype, generator: torch.Generator, group_size: int = 64, k: int = 3
) -> Example:
    indices, flat = [], []
    for start in range(0, numel, group_size):
        size = min(group_size, numel - start)
        kept = torch.randperm(size, generator=generator)[: min(k, size)].sort().values
        indices.append(kept)
        flat.append(kept + start)
    if not indices:
        indices = flat = [torch.zeros(0, dtype=torch.int64)]
    values = values_like_gradients(torch.cat(flat).numel(), dtype, generator)
    dense, sent = _scattered(numel, torch.cat(flat), values)
    return Example(GroupSparse(numel, group_size, k, values, torch.cat(indices)), dense, sent)


def row_sparse_example(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Example:
    width = next(width for width in (9, 8, 7, 3, 1) if numel % width == 0)
    num_rows = numel // width
    rows = torch.randperm(num_rows, generator=generator)[: math.ceil(num_rows / 5)].sort().values
    values = values_like_gradients(rows.numel() * width, dtype, generator)
    positions = (rows[:, None] * width + torch.arange(width)).view(-1)
    dense, sent = _scattered(numel, positions, values)
    return Example(RowSparse(numel, rows, values.view(-1, width)), dense, sent)


def seeded_example(numel: int, dtype: torch.dtype, generator: torch.Generator, seed: int = 2**64 - 3) -> Example:
    positions = seeded_positions(numel, numel // 10, seed)
    values = values_like_gradients(positions.numel(), dtype, generator)
    dense, sent = _scattered(numel, positions, values)
    return Example(Seeded(numel, seed, values), dense, sent)


def codes_example(
    numel: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    codebook: str = "levels",
    bits: int = 4,
    block_numel: int = 0,
) -> Example:
    codes = torch.randint(2**bits, (numel,), generator=generator)
    num_scales = math.ceil(numel / block_numel) if block_numel else min(1, numel)
    scales = values_like_gradients(num_scales, dtype, generator).abs()
    payload = packed_codes(codes, codebook=codebook, bits=bits, scales=scales, block_numel=block_numel)
    per_element = scales.float()[torch.arange(numel) // (block_numel or max(1, numel))]
    dense = find_codebook(codebook).values(bits)[codes] * per_element
    return Example(payload, dense, torch.ones(numel, dtype=torch.bool))


def triangle_example(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Example:
    size = math.isqrt(numel)
    matrix = values_like_gradients(size * size, torch.float32, generator).view(size, size)
    symmetric = (matrix + matrix.T).to(dtype)
    sent = torch.ones(size * size, dtype=torch.bool)
    return Example(Triangle.from_matrix(symmetric), symmetric.float().view(-1), sent)


def cholesky_example(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Example:
    size = math.isqrt(numel)
    factor = values_like_gradients(size * size, dtype, generator).view(size, size).tril()
    dense = factor.float() @ factor.float().T - 0.5 * torch.eye(size)
    sent = torch.ones(size * size, dtype=torch.bool)
    return Example(CholeskyFactor.from_factor(factor, damping=0.5), dense.view(-1), sent)


def bundle_example(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Example:
    parts = [(sparse_example, numel), (dense_example, 3), (group_sparse_example, numel)]
    made = [example(length, dtype, generator) for example, length in parts]
    return bundled([*made, sparse_example(numel, dtype, generator, density=0.9)])


def bundled(parts: list[Example]) -> Example:
    """Return a bundle of the examples."""
    return Example(
        Bundle([part.payload for part in parts]),
        torch.cat([part.dense for part in parts]),
        torch.cat([part.sent for part in parts]),
    )


def two_means_example(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Example:
    low, high = values_like_gradients(2, torch.float16, generator).tolist()
    is_high = torch.rand(numel, generator=generator) < 0.5
    dense = torch.where(is_high, high, low)
    return Example(TwoMeans(numel, low, high, pack_bits(is_high, 1)), dense, torch.ones(numel, dtype=torch.bool))


def packed_codes(codes: torch.Tensor, *, codebook: str, bits: int, scales: torch.Tensor, block_numel: int = 0) -> Codes:
    """Return a payload of codes that are not packed yet, integers or booleans [numel]."""
    packed = pack_bits(codes, bits, first=find_codebook(codebook).first)
    return Codes(codes.numel(), codebook, bits, packed, scales, block_numel)


def cut(payload: Payload, num_parts: int) -> list[Payload]:
    """Return the parts into which a collective cuts a message of this payload."""
    return [payload.slice(start, stop) for start, stop in Layout.of(payload).cuts(num_parts)]


Maker = Callable[[int, torch.dtype, torch.Generator], Example]

MAKERS: dict[str, Maker] = {
    "dense": dense_example,
    "sparse": sparse_example,
    "sparse-1%": lambda n, d, g: sparse_example(n, d, g, density=0.01),
    "sparse-30%": lambda n, d, g: sparse_example(n, d, g, density=0.3),
    "sparse_levels": sparse_levels_example,
    "sparse_codes": sparse_codes_example,
    "sparse_codes-sigma": lambda n, d, g: sparse_codes_example(n, d, g, "sigma", group_size=100, k=1),
    "sparse_codes-int8": lambda n, d, g: sparse_codes_example(n, d, g, "int8", group_size=64, k=20),
    "group_sparse": group_sparse_example,
    "group_sparse-1000": lambda n, d, g: group_sparse_example(n, d, g, group_size=1000, k=10),
    "group_sparse-bitmap": lambda n, d, g: group_sparse_example(n, d, g, group_size=8, k=4),
    "group_sparse-1": lambda n, d, g: group_sparse_example(n, d, g, group_size=1, k=1),
    "row_sparse": row_sparse_example,
    "seeded": seeded_example,
    "codes-sign": lambda n, d, g: codes_example(n, d, g, "sign", 1),
    "codes-ternary": lambda n, d, g: codes_example(n, d, g, "ternary", 2, 20),
    "codes-levels": lambda n, d, g: codes_example(n, d, g, "levels", 4, 7),
    "codes-levels-8": lambda n, d, g: codes_example(n, d, g, "levels", 8),
    "codes-natural": lambda n, d, g: codes_example(n, d, g, "natural", 4),
    "two_means": two_means_example,
    "triangle": triangle_example,
    "cholesky": cholesky_example,
    "bundle": bundle_example,
}


def make(name: str, numel: int, dtype: torch.dtype, seed: int = 0) -> Example:
    """Return the example with this name; it is the same for the same arguments."""
    return MAKERS[name](numel, dtype, torch.Generator().manual_seed(seed))


def _scattered(numel: int, positions: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dense, sent = torch.zeros(numel), torch.zeros(numel, dtype=torch.bool)
    dense[positions], sent[positions] = values.float(), True
    return dense, sent
