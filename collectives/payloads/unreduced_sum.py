"""UnreducedSum: a sum whose terms have not been added yet. It never travels; all-gather returns it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NoReturn, Self

import torch
from typing_extensions import override

from collectives.payloads.base import Header, KeepLost, Payload
from collectives.payloads.codec.values import add_divided_
from collectives.payloads.dense import Dense
from collectives.payloads.errors import PayloadError


@dataclasses.dataclass(eq=False)
class UnreducedSum(Payload):
    """One payload per rank, standing for their sum in rank order.

    Attributes:
        terms: payloads of one length, by rank; at least one.

    Raises:
        PayloadError: no terms, or terms of different lengths.
    """

    code = 0

    terms: Sequence[Payload]

    def __post_init__(self) -> None:
        if not self.terms:
            raise PayloadError("a sum needs at least one term")
        self.numel = self.terms[0].numel
        for term in self.terms:
            self._check_fits(term)

    @property
    @override
    def device(self) -> torch.device:
        return self.terms[0].device

    @property
    @override
    def num_entries(self) -> int:
        return sum(term.num_entries for term in self.terms)

    @property
    @override
    def nbytes(self) -> int:
        return sum(term.nbytes for term in self.terms)

    @override
    def fields(self) -> NoReturn:
        raise PayloadError("a sum of separate terms does not travel; send its merged() payload")

    @override
    @classmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Self:
        raise PayloadError("a sum of separate terms does not travel")

    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        """`dense += (term 0 + term 1 + ...) / divisor`: added in rank order in fp32 or better, then divided."""
        first, *others = self.terms
        if others and first.add_all_to_(others, dense, divisor=divisor):
            return
        if dense.dtype == torch.float32 and math.frexp(divisor)[0] == 0.5:
            for term in self.terms:  # dividing by a power of two is exact, so it may as well come first
                term.add_to_(dense, divisor=divisor)
        elif dense.dtype == torch.float32 and not dense.any():  # the usual target, a fresh one, can hold the sum itself
            self.add_to_(dense)
            dense.div_(divisor)
        else:
            total = dense.new_zeros(self.numel, dtype=torch.promote_types(dense.dtype, torch.float32))
            for term in self.terms:
                term.add_to_(total)
            add_divided_(dense, total, divisor)

    @override
    def write_to(self, parts: Sequence[torch.Tensor], *, divisor: float) -> bool:
        first, *others = self.terms
        return first.write_all_to(others, parts, divisor=divisor)

    @override
    def subtract_from_(self, dense: torch.Tensor) -> None:
        for term in self.terms:
            term.subtract_from_(dense)

    @override
    def clear_in_(self, dense: torch.Tensor) -> None:
        for term in self.terms:
            term.clear_in_(dense)

    @override
    def slice(self, start: int, stop: int) -> UnreducedSum:
        return UnreducedSum([term.slice(start, stop) for term in self.terms])

    @property
    @override
    def alignment(self) -> int:
        return math.lcm(*(term.alignment for term in self.terms))

    @override
    def entries_between(self, borders: list[int]) -> list[int]:
        return [sum(counts) for counts in zip(*(term.entries_between(borders) for term in self.terms), strict=True)]

    def merged(self, keep_lost: KeepLost | None = None) -> Payload:
        """The sum as one payload that can travel: added in rank order where the kind allows it, else dense in fp32."""
        if all(term.addable for term in self.terms):
            return functools.reduce(lambda total, term: total.add(term, keep_lost), self.terms)
        return Dense(self.to_dense())
