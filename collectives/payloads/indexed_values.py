"""What the kinds share that hold single values at positions: Sparse, GroupSparse, Seeded."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from collectives.kernels.loop import Float, Int, Loop, array
from collectives.payloads.base import KeepLost, Payload
from collectives.payloads.codec.values import SHORT, add_values, divided, lost_in_sum
from collectives.payloads.typed_values import TypedValues
from collectives.payloads.written_sum import write_sum_

_ADD_AT = {
    dtype: Loop(name, array(dtype), array(torch.int64), Int, Float, array(torch.float32), Int, returns=Int)
    for dtype, name in (
        (torch.float32, "add_fp32_at"),
        (torch.float16, "add_fp16_at"),
        (torch.bfloat16, "add_bf16_at"),
    )
}
ANY, MINUS_ZERO = 1, 2
_SURVEY = {
    dtype: Loop(name, array(dtype), Int, returns=Int)
    for dtype, name in (
        (torch.float32, "survey_fp32"),
        (torch.float16, "survey_halves"),
        (torch.bfloat16, "survey_halves"),
    )
}


class IndexedValues(TypedValues):
    """Values, floating [num_entries], at strictly ascending positions; zero elsewhere."""

    @property
    @abc.abstractmethod
    def positions(self) -> torch.Tensor:
        """Flat positions, int64 [num_entries], strictly ascending."""

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        self._add_at(dense, divisor)

    @override
    def write_all_to(self, others: Sequence[Payload], parts: Sequence[torch.Tensor], *, divisor: float) -> bool:
        terms = [term for term in (self, *others) if isinstance(term, IndexedValues)]
        if len(terms) < 1 + len(others):
            return False
        return write_sum_([t.values for t in terms], [t.positions for t in terms], parts, divisor=divisor)

    @override
    def subtract_from_(self, dense: torch.Tensor) -> None:
        self._add_at(dense, -1.0)

    def _add_at(self, dense: torch.Tensor, divisor: float) -> None:
        positions, values = self.positions, self.values
        loop = _ADD_AT.get(values.dtype)
        if loop is None or dense.dtype != torch.float32 or not (dense.is_contiguous() and loop.serves(dense, values)):
            dense.scatter_add_(0, positions, divided(values, divisor, dense.dtype))
        elif not loop(values.contiguous(), positions.contiguous(), values.numel(), divisor, dense, dense.numel()):
            raise IndexError(f"a position lies outside the {dense.numel()} elements")

    @override
    def clear_in_(self, dense: torch.Tensor) -> None:
        dense.index_fill_(0, self.positions, 0)

    @override
    def entries_between(self, borders: list[int]) -> list[int]:
        if self.positions.is_cpu:  # by numpy, which makes no tensors of a few numbers
            before = np.searchsorted(self.positions.numpy(), borders).tolist()
        else:
            before = torch.searchsorted(self.positions, torch.tensor(borders, device=self.device)).tolist()
        return [stop - start for start, stop in itertools.pairwise(before)]

    def _added_onto(self, values: torch.Tensor, keep_lost: KeepLost | None) -> torch.Tensor:
        total = values.to(torch.promote_types(values.dtype, self.values.dtype), copy=True)
        here = total.index_select(0, self.positions)
        there = add_values(here, self.values).to(total.dtype)
        if keep_lost is not None and total.dtype in SHORT:
            keep_lost(0, lost_in_sum(here, self.values, there), self.positions)
        return total.index_copy_(0, self.positions, there)


def canonical_values(values: torch.Tensor) -> torch.Tensor:
    """The values with -0.0 as +0.0, themselves where there is none; none where all are zero: there is nothing to send.

    Merging copies an entry that only one side has and would keep a sign that 0 + -0.0 loses in a dense sum.
    """
    survey = _SURVEY.get(values.dtype)
    if survey is not None and survey.serves(values):
        found = survey(values.contiguous(), values.numel())
        kept = values if found & ANY else values[:0]
        return kept.masked_fill(kept == 0, 0) if found & MINUS_ZERO else kept
    if not values.numel():
        return values
    smallest, largest = values.aminmax()  # a tenth of the time of values.any(); NaN differs from 0 as well
    return values[:0] if smallest == 0 == largest else values + 0
