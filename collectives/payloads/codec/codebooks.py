"""Codebooks of `Codes` payloads: tables of at most 256 values, in units of the scale, and decoding by them.

Sources: sign: Bernstein et al. 2018 (arXiv:1802.04434). ternary: MXNet's 2-bit gradient compression, with the same
bit layout. levels: QSGD, Alistarh et al. 2017 (arXiv:1610.02132). natural: Horvath et al. 2019 (arXiv:1905.10988),
with exponents counted down from the scale.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from collectives.kernels.loop import Float, FloatArray, Int, Longs, Loop, also_on_gpus, longs
from collectives.payloads.codec.bits import First, unpack_bits
from collectives.payloads.codec.values import divided
from collectives.payloads.fields import PayloadError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codebook:
    """The values of b-bit codes.

    Attributes:
        name: name in `Codes.codebook`.
        number: number in packed payloads, 0..255.
        widths: supported bits per code; each divides 8.
        values: (bits) -> fp32 [2^bits], the value of each code.
        first: whether a byte's first code lies in its low or its high bits.
    """

    name: str
    number: int
    widths: tuple[int, ...]
    values: Callable[[int], torch.Tensor]
    first: First = "low"

    def byte_table(self, bits: int, device: torch.device) -> torch.Tensor:
        """Return the values of each byte of packed codes, in order: fp32 [256, 8 / bits]."""
        return _byte_table(self, bits).to(device)


def register(codebook: Codebook) -> Codebook:
    """Register a codebook under its name and number, and return it.

    Raises:
        ValueError: the name or the number is taken, or a width does not divide 8.
    """
    if codebook.name in _BY_NAME or codebook.number in _BY_NUMBER:
        raise ValueError(f"codebook {codebook.name} (number {codebook.number}) clashes with one that exists")
    if any(bits not in (1, 2, 4, 8) for bits in codebook.widths):
        raise ValueError(f"codebook {codebook.name}: codes are 1, 2, 4 or 8 bits wide, got {codebook.widths}")
    _BY_NAME[codebook.name] = _BY_NUMBER[codebook.number] = codebook
    return codebook


def codebook_named(name: str) -> Codebook:
    """Return the codebook of this name.

    Raises:
        PayloadError: there is none.
    """
    if name not in _BY_NAME:
        raise PayloadError(f"no codebook is called '{name}'; choose one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def codebook_numbered(number: int) -> Codebook:
    """Return the codebook of this number.

    Raises:
        PayloadError: there is none.
    """
    if number not in _BY_NUMBER:
        raise PayloadError(f"no codebook has the number {number}")
    return _BY_NUMBER[number]


_BY_NAME: dict[str, Codebook] = {}
_BY_NUMBER: dict[int, Codebook] = {}


@functools.cache
def _byte_table(codebook: Codebook, bits: int) -> torch.Tensor:
    every_byte = torch.arange(256).to(torch.uint8)
    codes = unpack_bits(every_byte, 256 * 8 // bits, bits, first=codebook.first)
    return codebook.values(bits)[codes].view(256, 8 // bits)


def _sign_values(bits: int) -> torch.Tensor:
    """Return the values of 1-bit codes: 0 is -1, 1 is +1."""
    return torch.tensor([-1.0, 1.0], dtype=torch.float32)


def _ternary_values(bits: int) -> torch.Tensor:
    """Return the values of 2-bit codes: binary 00 is 0, 11 is +1, 10 is -1; 01 is never sent and decodes to 0."""
    return torch.tensor([0.0, 0.0, -1.0, 1.0], dtype=torch.float32)


def _level_values(bits: int) -> torch.Tensor:
    """Return the values of codes in two's complement."""
    codes = torch.arange(2**bits)
    return torch.where(codes < 2 ** (bits - 1), codes, codes - 2**bits).float()


def _natural_values(bits: int) -> torch.Tensor:
    """Return the values of codes with a sign in the top bit and j in the others: 0 for j = 0, else 2^(1-j)."""
    exponents = torch.arange(2 ** (bits - 1), dtype=torch.float32)
    magnitudes = torch.where(exponents == 0, 0.0, torch.exp2(1.0 - exponents))
    return torch.cat([magnitudes, -magnitudes + 0])


SIGN = register(Codebook(name="sign", number=0, widths=(1,), values=_sign_values))
TERNARY = register(Codebook(name="ternary", number=1, widths=(2,), values=_ternary_values, first="high"))
LEVELS = register(Codebook(name="levels", number=2, widths=(2, 4, 8), values=_level_values))
NATURAL = register(Codebook(name="natural", number=3, widths=(2, 4, 8), values=_natural_values))


# (packed codes, uint8 [ceil(numel * bits / 8)], and scales, floating [ceil(numel / block_numel)])
Term = tuple[torch.Tensor, torch.Tensor]

_ADD = Loop("add_codes", Longs, Longs, Int, FloatArray, Int, Int, Float, Float, FloatArray, Int)
_WRITE = Loop("write_codes", Longs, Longs, Int, FloatArray, Int, Int, Float, Int, FloatArray, Int)


def add_codes_(
    dense: torch.Tensor,
    terms: Sequence[Term],
    table: torch.Tensor,
    *,
    block_numel: int,
    divisor: float = 1.0,
    sign: float = 1.0,
) -> None:
    """Add sign * (term 0 + term 1 + ...) / divisor to `dense` in one pass.

    Args:
        dense: floating [numel], mutated.
        terms: added in their order, in fp32.
        table: fp32 [256, 8 / bits], contiguous: the result of `Codebook.byte_table`.
        block_numel: elements per scale, at least 1.
        divisor: applied to the sum.
        sign: 1 or -1.

    Raises:
        PayloadError: `dense` is longer than the codes.
    """
    parts = _readable(terms, table, block_numel, dense.numel())
    add = add_codes_to_floats_ if dense.dtype == torch.float32 and dense.is_contiguous() else _add_decoded
    add(dense, parts, table, block_numel, divisor, sign)


@also_on_gpus
def add_codes_to_floats_(
    dense: torch.Tensor, terms: Sequence[Term], table: torch.Tensor, block_numel: int, divisor: float, sign: float
) -> None:
    """Do `add_codes_` for contiguous tensors and fp32 `dense`."""
    if not _ADD.serves(dense, *(tensor for term in terms for tensor in term)):
        _add_decoded(dense, terms, table, block_numel, divisor, sign)
        return
    _ADD(*_addresses(terms), len(terms), table, table.shape[1], block_numel, sign, divisor, dense, dense.numel())


def write_codes_(
    parts: Sequence[torch.Tensor],
    terms: Sequence[Term],
    table: torch.Tensor,
    *,
    block_numel: int,
    divisor: float,
) -> bool:
    """Write (term 0 + term 1 + ...) / divisor into `parts` in one pass; bit for bit as `add_codes_` to zeros.

    Args:
        parts: floating and 1-D, consecutive parts of the result; overwritten.
        terms: as for `add_codes_`; without terms the parts become zeros.
        table: as for `add_codes_`.
        block_numel: elements per scale, at least 1.
        divisor: applied to the sum.

    Returns:
        False, with `parts` unchanged, if no native loop supports these tensors.

    Raises:
        PayloadError: the parts are longer than the codes.
    """
    if any(part.dtype != torch.float32 or not part.is_contiguous() for part in parts):
        return False
    if not _WRITE.serves(*parts, *(tensor for term in terms for tensor in term)):
        return False
    readable = _readable(terms, table, block_numel, sum(part.numel() for part in parts))
    codes, scales = _addresses(readable)
    first = 0
    for part in parts:
        _WRITE(codes, scales, len(terms), table, table.shape[1], block_numel, divisor, first, part, part.numel())
        first += part.numel()
    return True


def _readable(terms: Sequence[Term], table: torch.Tensor, block_numel: int, numel: int) -> list[Term]:
    """Return the terms contiguous and with fp32 scales, as the loops need them.

    Raises:
        PayloadError: a term is shorter than `numel`.
    """
    readable = [(packed.contiguous(), scales.float().contiguous()) for packed, scales in terms]
    for packed, scales in readable:
        held = min(len(packed) * table.shape[1], len(scales) * block_numel)
        if numel > held:
            raise PayloadError(f"codes of {held} elements cannot be added to {numel}")
    return readable


def _addresses(terms: Sequence[Term]) -> tuple[Any, Any]:
    """Return the addresses of the terms' codes, and those of their scales."""
    return longs([packed.data_ptr() for packed, _ in terms]), longs([scales.data_ptr() for _, scales in terms])


def _add_decoded(
    dense: torch.Tensor, terms: Sequence[Term], table: torch.Tensor, block_numel: int, divisor: float, sign: float
) -> None:
    values = [_decoded(packed, scales, table, block_numel, dense.numel()) for packed, scales in terms]
    total = values[0] if len(values) == 1 else functools.reduce(torch.add, values, torch.zeros_like(values[0]))
    dense.add_(divided(total, sign * divisor, dense.dtype))


def _decoded(
    packed: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, block_numel: int, numel: int
) -> torch.Tensor:
    """Return the values as a new tensor, fp32 [numel]."""
    values = table[packed.to(torch.int32)].view(-1)[:numel]
    return values * scales.repeat_interleave(min(block_numel, numel))[:numel]
