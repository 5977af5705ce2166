"""Codebooks: what the codes of a `Codes` payload mean. Each is a table of at most 256 values, in units of the scale.

Sources: sign: Bernstein et al. 2018 (arXiv:1802.04434). ternary: MXNet's 2-bit gradient compression, whose layout is
    kept bit for bit.
levels: QSGD, Alistarh et al. 2017 (arXiv:1610.02132). natural: Horvath et al. 2019 (arXiv:1905.10988), with exponents
    counted down from
the scale.
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
    """A named meaning of b-bit codes.

    Attributes:
        name: what a payload calls it.
        number: what the header calls it, 0..255.
        widths: bits per code it exists for; each divides 8.
        values: (bits) -> fp32 [2^bits], the value of each code.
        first: where a byte's first code lies.
    """

    name: str
    number: int
    widths: tuple[int, ...]
    values: Callable[[int], torch.Tensor]
    first: First = "low"

    def byte_table(self, bits: int, device: torch.device) -> torch.Tensor:
        """fp32 [256, 8 / bits]: the values that each byte of packed codes stands for, in order."""
        return _byte_table(self, bits).to(device)


def register(codebook: Codebook) -> Codebook:
    """Make a codebook known by name and number; returns it.

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
    """The codebook of this name.

    Raises:
        PayloadError: there is none.
    """
    if name not in _BY_NAME:
        raise PayloadError(f"no codebook is called '{name}'; there are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def codebook_numbered(number: int) -> Codebook:
    """The codebook of this number.

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
    """0 is -1, 1 is +1."""
    return torch.tensor([-1.0, 1.0], dtype=torch.float32)


def _ternary_values(bits: int) -> torch.Tensor:
    """Binary 00 is 0, 11 is +1, 10 is -1; 01 is never sent and decodes to 0."""
    return torch.tensor([0.0, 0.0, -1.0, 1.0], dtype=torch.float32)


def _level_values(bits: int) -> torch.Tensor:
    """Two's complement: 0..2^(b-1)-1 are themselves, the upper half is negative."""
    codes = torch.arange(2**bits)
    return torch.where(codes < 2 ** (bits - 1), codes, codes - 2**bits).float()


def _natural_values(bits: int) -> torch.Tensor:
    """Top bit: sign. The rest: 0 is 0, j is 2^(1-j), a power of two relative to the scale."""
    exponents = torch.arange(2 ** (bits - 1), dtype=torch.float32)
    magnitudes = torch.where(exponents == 0, 0.0, torch.exp2(1.0 - exponents))
    return torch.cat([magnitudes, -magnitudes + 0])


SIGN = register(Codebook(name="sign", number=0, widths=(1,), values=_sign_values))
TERNARY = register(Codebook(name="ternary", number=1, widths=(2,), values=_ternary_values, first="high"))
LEVELS = register(Codebook(name="levels", number=2, widths=(2, 4, 8), values=_level_values))
NATURAL = register(Codebook(name="natural", number=3, widths=(2, 4, 8), values=_natural_values))


Term = tuple[torch.Tensor, torch.Tensor]
"""packed codes, uint8 [ceil(numel * bits / 8)], and scales, floating [ceil(numel / block_numel)]"""

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
    """`dense += sign * (term 0 + term 1 + ...) / divisor`, in one pass over `dense`.

    Args:
        dense: floating [numel], mutated.
        terms: added in their order, in fp32.
        table: fp32 [256, 8 / bits], contiguous: the values that each byte of codes stands for, in order.
        block_numel: elements per scale, at least 1.
        divisor: of the sum.
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
    """`add_codes_` for fp32 that is contiguous, as all of the terms."""
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
    """`parts`, laid end to end, become what `add_codes_` would leave in zeros: one pass that reads nothing of them.

    Args:
        parts: floating and 1-D; overwritten.
        terms: as there; without any the parts become zeros.
        table: as there.
        block_numel: as there.
        divisor: of the sum.

    Returns:
        False, and nothing done, where no native loop serves these tensors.

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
    """The terms as loops read them.

    Raises:
        PayloadError: they are shorter than `numel`.
    """
    readable = [(packed.contiguous(), scales.float().contiguous()) for packed, scales in terms]
    for packed, scales in readable:
        held = min(len(packed) * table.shape[1], len(scales) * block_numel)
        if numel > held:
            raise PayloadError(f"codes of {held} elements cannot be added to {numel}")
    return readable


def _addresses(terms: Sequence[Term]) -> tuple[Any, Any]:
    """Where the terms' codes begin, and where their scales do."""
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
    """fp32 [numel], freshly made."""
    values = table[packed.to(torch.int32)].view(-1)[:numel]
    return values * scales.repeat_interleave(min(block_numel, numel))[:numel]
