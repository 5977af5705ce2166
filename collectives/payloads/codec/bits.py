"""Codes of a few bits: functions that pack them, and codebooks, which are tables of the values of codes.

Sources: sign: Bernstein et al. 2018 (arXiv:1802.04434). ternary: MXNet's 2-bit gradient compression, with the same
bit layout. levels: QSGD, Alistarh et al. 2017 (arXiv:1610.02132). natural: Horvath et al. 2019 (arXiv:1905.10988),
with exponents counted down from the scale.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from collectives.kernels.loop import (
    ByteArray,
    Float,
    FloatArray,
    Int,
    LongArray,
    Longs,
    Loop,
    addresses,
    also_on_gpus,
)
from collectives.payloads.codec.values import divided
from collectives.payloads.fields import PayloadError

First = Literal["low", "high"]

_PACK = Loop("pack_bits", LongArray, Int, Int, ByteArray)
_UNPACK = Loop("unpack_bits", ByteArray, Int, Int, LongArray)
_ADD = Loop("add_codes", Longs, Longs, Int, FloatArray, Int, Int, Float, Float, FloatArray, Int)
_WRITE = Loop("write_codes", Longs, Longs, Int, FloatArray, Int, Int, Float, Int, FloatArray, Int)


def packed_nbytes(count: int, bits: int) -> int:
    """Return the bytes that `count` codes of `bits` bits take: ceil(count * bits / 8)."""
    return -(-count * bits // 8)


def bits_for(num_values: int) -> int:
    """Return the bits that a code needs to distinguish `num_values` values: ceil(log2 num_values); 0 for 0 or 1."""
    return max(0, num_values - 1).bit_length()


def pack_bits(codes: torch.Tensor, bits: int, *, first: First = "low") -> torch.Tensor:
    """Pack codes of a few bits into bytes, without gaps.

    Args:
        codes: integer or bool [count]; only the low `bits` bits of each are used.
        bits: bits per code, 0..32.
        first: "low" if a byte's first code lies in its low bits, "high" if it lies in the byte's high bits (as in
            MXNet's 2-bit compression).

    Returns:
        uint8 [ceil(count * bits / 8)] on the same device; unused bits of the last byte are 0.
    """
    codes = codes.to(torch.int64).contiguous()
    if first == "low" and _PACK.serves(codes):
        packed = torch.empty(packed_nbytes(codes.numel(), bits), dtype=torch.uint8)
        _PACK(codes, codes.numel(), bits, packed)
        return packed
    spread = (codes.unsqueeze(1) >> _places(bits, first, codes.device)) & 1
    of_bytes = torch.nn.functional.pad(spread.view(-1), (0, -spread.numel() % 8)).view(-1, 8)
    return (of_bytes << _places(8, first, codes.device)).sum(1).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int, bits: int, *, first: First = "low") -> torch.Tensor:
    """Unpack codes that `pack_bits` packed.

    Args:
        packed: uint8 [>= ceil(count * bits / 8)], contiguous.
        count: number of codes.
        bits: bits per code, 0..32.
        first: as in `pack_bits`: "low" if a byte's first code lies in its low bits, otherwise "high".

    Returns:
        The codes, int64 [count], 0..2^bits - 1.
    """
    if first == "low" and _UNPACK.serves(packed):
        codes = torch.empty(count, dtype=torch.int64)
        _UNPACK(packed, count, bits, codes)
        return codes
    of_bytes = packed[: packed_nbytes(count, bits)].to(torch.int64).unsqueeze(1)
    spread = (of_bytes >> _places(8, first, packed.device)) & 1
    return (spread.view(-1)[: count * bits].view(count, bits) << _places(bits, first, packed.device)).sum(1)


def _places(bits: int, first: First, device: torch.device) -> torch.Tensor:  # bit numbers in packing order
    places = torch.arange(bits, device=device)
    return places if first == "low" else places.flip(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codebook:
    """A table of the values of codes of a few bits, before these values are multiplied by a scale.

    Attributes:
        name: name of the codebook, as in `Codes.codebook`.
        number: number of the codebook in packed payloads, 0..255.
        widths: supported bits per code; each divides 8.
        values: (bits) -> fp32 [2^bits]: returns the value of each code.
        first: "low" if a byte's first code lies in its low bits, "high" if it lies in the byte's high bits.
    """

    name: str
    number: int
    widths: tuple[int, ...]
    values: Callable[[int], torch.Tensor]
    first: First = "low"


def find_codebook(key: str | int) -> Codebook:
    """Return the codebook of this name or number.

    Raises:
        PayloadError: no codebook has this name or number.
    """
    if key not in _CODEBOOKS:
        names = ", ".join(name for name in _CODEBOOKS if isinstance(name, str))
        raise PayloadError(f"no codebook is called '{key}'; choose one of {names}")
    return _CODEBOOKS[key]


@functools.cache
def byte_table(codebook: Codebook, bits: int, device: torch.device) -> torch.Tensor:
    """Return the values of the codes in each of the 256 possible bytes, in packing order: fp32 [256, 8 / bits]."""
    codes = unpack_bits(torch.arange(256).to(torch.uint8), 256 * 8 // bits, bits, first=codebook.first)
    return codebook.values(bits)[codes].view(256, 8 // bits).to(device)


def _level_values(bits: int) -> torch.Tensor:  # codes are in two's complement
    codes = torch.arange(2**bits)
    return torch.where(codes < 2 ** (bits - 1), codes, codes - 2**bits).float()


def _natural_values(bits: int) -> torch.Tensor:
    """Return the values of codes whose top bit is the sign and whose other bits are j: 0 if j = 0, else 2^(1-j)."""
    exponents = torch.arange(2 ** (bits - 1), dtype=torch.float32)
    magnitudes = torch.where(exponents == 0, 0.0, torch.exp2(1.0 - exponents))
    return torch.cat([magnitudes, -magnitudes + 0])


SIGN = Codebook(name="sign", number=0, widths=(1,), values=lambda bits: torch.tensor([-1.0, 1.0]))
TERNARY = (  # binary 00 is 0, 11 is +1, 10 is -1; 01 is never sent and decodes to 0
    Codebook(
        name="ternary", number=1, widths=(2,), values=lambda bits: torch.tensor([0.0, 0.0, -1.0, 1.0]), first="high"
    )
)
LEVELS = Codebook(name="levels", number=2, widths=(2, 4, 8), values=_level_values)
NATURAL = Codebook(name="natural", number=3, widths=(2, 4, 8), values=_natural_values)

_CODEBOOKS: dict[str | int, Codebook] = {  # by name and by number
    key: book for book in (SIGN, TERNARY, LEVELS, NATURAL) for key in (book.name, book.number)
}


# (packed codes, uint8 [ceil(numel * bits / 8)], and scales, floating [ceil(numel / block_numel)])
Term = tuple[torch.Tensor, torch.Tensor]


def add_codes_(
    dense: torch.Tensor, terms: Sequence[Term], table: torch.Tensor, *, block_numel: int, divisor: float
) -> None:
    """Add (term 0 + term 1 + ...) / divisor to `dense` in one pass, where each term is a tensor of packed codes.

    Args:
        dense: floating [numel], mutated.
        terms: (packed codes, scales) of each term; terms are added in this order, in fp32.
        table: the result of `byte_table`, fp32 [256, 8 / bits], contiguous.
        block_numel: elements per scale, at least 1.
        divisor: the sum is divided by this number, which may be negative.

    Raises:
        PayloadError: `dense` is longer than the codes.
    """
    readable = _readable(terms, table, block_numel, dense.numel())
    add = add_codes_to_floats_ if dense.dtype == torch.float32 and dense.is_contiguous() else _add_decoded
    add(dense, readable, table, block_numel, divisor)


@also_on_gpus
def add_codes_to_floats_(
    dense: torch.Tensor, terms: Sequence[Term], table: torch.Tensor, block_numel: int, divisor: float
) -> None:
    """Add the sum of terms of packed codes, divided by `divisor`, to `dense`, which is fp32 and contiguous.

    Terms are (packed codes, scales), `table` is the result of `byte_table`, and `block_numel` is the number of elements
    per scale. `add_codes_` also supports other tensors.
    """
    if not _ADD.serves(dense, *(tensor for term in terms for tensor in term)):
        _add_decoded(dense, terms, table, block_numel, divisor)
        return
    codes, scales = map(addresses, zip(*terms, strict=True))
    _ADD(
        codes, scales, len(terms), table, table.shape[1], block_numel, math.copysign(1.0, divisor), abs(divisor),
        dense, dense.numel(),
    )  # fmt: skip


def write_codes_(
    parts: Sequence[torch.Tensor], terms: Sequence[Term], table: torch.Tensor, *, block_numel: int, divisor: float
) -> bool:
    """Write (term 0 + term 1 + ...) / divisor into `parts` in one pass, where each term is a tensor of packed codes.

    The result has the same bits as if `add_codes_` added the terms to zeros.

    Args:
        parts: tensors for consecutive parts of the result, floating and 1-D; overwritten.
        terms: (packed codes, scales) of each term, added in this order, in fp32; if there are none, `parts` become 0.
        table: the result of `byte_table`, fp32 [256, 8 / bits], contiguous.
        block_numel: elements per scale, at least 1.
        divisor: the sum is divided by this number.

    Returns:
        True; False, with `parts` unchanged, if no native loop supports these tensors.

    Raises:
        PayloadError: the parts are longer than the codes.
    """
    if any(part.dtype != torch.float32 or not part.is_contiguous() for part in parts):
        return False
    if not _WRITE.serves(*parts, *(tensor for term in terms for tensor in term)):
        return False
    readable = _readable(terms, table, block_numel, sum(part.numel() for part in parts))
    codes, scales = (addresses([term[index] for term in readable]) for index in (0, 1))
    first = 0
    for part in parts:
        _WRITE(codes, scales, len(terms), table, table.shape[1], block_numel, divisor, first, part, part.numel())
        first += part.numel()
    return True


def _readable(terms: Sequence[Term], table: torch.Tensor, block_numel: int, numel: int) -> list[Term]:
    """Return the terms with contiguous codes and contiguous fp32 scales, as the native loops need them.

    Raises:
        PayloadError: a term has fewer than `numel` elements.
    """
    readable = [(packed.contiguous(), scales.float().contiguous()) for packed, scales in terms]
    for packed, scales in readable:
        held = min(len(packed) * table.shape[1], len(scales) * block_numel)
        if numel > held:
            raise PayloadError(f"codes of {held} elements cannot be added to a tensor of {numel}")
    return readable


def _add_decoded(
    dense: torch.Tensor, terms: Sequence[Term], table: torch.Tensor, block_numel: int, divisor: float
) -> None:
    numel = dense.numel()
    values = [
        table[packed.to(torch.int32)].view(-1)[:numel] * scales.repeat_interleave(min(block_numel, numel))[:numel]
        for packed, scales in terms
    ]
    total = values[0] if len(values) == 1 else functools.reduce(torch.add, values, torch.zeros_like(values[0]))
    dense.add_(divided(total, divisor, dense.dtype))
