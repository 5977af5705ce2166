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
from collections.abc import Callable

import torch

from collectives.payloads.codec.bits import First, unpack_bits
from collectives.payloads.errors import PayloadError


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
