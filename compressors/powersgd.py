"""PowerSGD: every matrix as a product of two thin ones, found by a step of power iteration that all ranks share.

Source: Vogels, Karimireddy, Jaggi 2019 (arXiv:1905.13727), algorithms 1 and 2; the residual is the compensated
gradient less the common reconstruction, as in the paper's code and in PyTorch's hook.
Differs: state belongs to parameters, not to buckets, so the engine may regroup them; matrices of one shape are
orthogonalised as a batch, each by itself. Factors are kept as rows, so that a product runs along rows of the gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from typing_extensions import Doc, override

from collectives.options import Count, CountOrZero, OptionError, Positive
from collectives.payloads.base import HEADER_BYTES
from compressors.base import FP32_BYTES, Average, Given, LossyCompressor
from compressors.kernels.random import seed_for, uniform_numbers
from compressors.layer import Layer, Step

Factor = Literal["last_p", "last_q"]


@dataclasses.dataclass(kw_only=True)
class PowerSgd(LossyCompressor):
    """Send a gradient [n, m] as P [n, r] and Q [m, r], where r is `rank`; the rest is sent in fp32.

    Two messages per bucket: all P and what is not compressed, then all Q. Both are plain sums, so any collective
    carries them. `alternate` sends P at even steps and Q at odd ones, each found from the other as it was sent last:
    one message, half the bytes and one product less, but the factors follow the gradient half as fast.

    Bytes: 16 + 4 (sum of r n + elements not compressed) + 16 + 4 (sum of r m) for a bucket; the second message only
    where something is compressed. With `alternate` one message, without the factor whose turn it is not.

    Raises:
        OptionError: "powersgd: alternate=true needs warm_start=true".
    """

    several_rounds: ClassVar[bool] = True

    rank: Annotated[Count, Doc("r, columns of the two thin matrices")] = 2
    min_compression_rate: Annotated[Positive, Doc("compress where n m / (r (n + m)) exceeds this")] = 2.0
    warm_start: Annotated[bool, Doc("go on from the last step's Q; else draw it anew")] = True
    alternate: Annotated[bool, Doc("send one of P and Q per step, in turns, instead of both")] = False
    dense_steps: Annotated[CountOrZero, Doc("first optimizer steps in which everything is sent")] = 0
    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alternate and not self.warm_start:
            raise OptionError(
                "powersgd: alternate=true needs warm_start=true, for each factor is found from the other one of the "
                "step before"
            )

    def leaves_dense(self, layer: Layer) -> bool:
        """What the policy names, and what two thin matrices would not shrink enough."""
        if super().leaves_dense(layer) or len(layer.shape) < 2 or layer.numel == 0:
            return True
        share = 0.5 if self.alternate else 1.0
        return share * self._num_both(layer) * self.min_compression_rate >= layer.numel

    def contraction_bound(self, layer: Layer) -> float:
        """1 - r / min(n, m) in expectation where Q is drawn anew; 1 where a gradient may lie across the last Q.

        P P^T X is the best approximation of X by columns of X Q, so it loses no more than X Q Q^T, which keeps
        |X Q|^2 for an orthonormal Q: r / m of |X|^2 on average, and r / n likewise where X has fewer rows than columns,
        for only the part of Q in its row space counts.
        """
        return 1.0 if self.warm_start else 1 - self._rank_of(layer) / min(matrix_shape(layer))

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return None if self.alternate else 2 * HEADER_BYTES + FP32_BYTES * self._num_both(layer)

    @override
    def expected_bucket_nbytes(self, layers: Sequence[Layer]) -> int | None:
        rest = sum(layer.numel for layer in layers if self.leaves_dense(layer))
        factors = sum(self._num_both(layer) for layer in layers if not self.leaves_dense(layer))
        if self.alternate and factors:
            return None
        num_messages = 2 if factors else 1 if rest else 0
        return num_messages * HEADER_BYTES + FP32_BYTES * (factors + rest)

    @override
    def is_dense_at(self, step_index: int) -> bool:
        return step_index < self.dense_steps

    @override
    def reduce(
        self,
        compressed: Given,
        rest: Sequence[torch.Tensor],
        step: Step,
        average: Average,
        updates: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Two rounds: all P and the rest, then all Q; or one, of the factor whose turn it is and the rest."""
        batches = _by_shape(compressed, updates)
        known: Factor = "last_p" if self.alternate and step.index % 2 else "last_q"
        before = [_orthonormal(self._last(batch, known, step)) for batch in batches]
        found = _averaged(
            [batch.times(rows, known) for batch, rows in zip(batches, before, strict=True)] + list(rest), average
        )
        factors, means = found[: len(batches)], found[len(batches) :]
        ps, qs = (before, factors) if known == "last_p" else (factors, before)
        if not self.alternate:
            ps = [_orthonormal(p) for p in ps]
            qs = _averaged([batch.times(p, "last_p") for batch, p in zip(batches, ps, strict=True)], average)
        for batch, p, q in zip(batches, ps, qs, strict=True):
            batch.write_products(p, q)
            if self.warm_start and (known == "last_p" or not self.alternate):
                batch.keep(q, "last_q", step)
            elif self.warm_start:
                batch.keep(p, "last_p", step)
        return means

    @override
    def num_exchanged(self, layer: Layer, step: Step) -> int:
        if not self.alternate:
            return self._num_both(layer)
        return self._rank_of(layer) * matrix_shape(layer)[step.index % 2]

    def _num_both(self, layer: Layer) -> int:
        return self._rank_of(layer) * sum(matrix_shape(layer))

    def _last(self, batch: _Batch, factor: Factor, step: Step) -> torch.Tensor:
        """The factors to begin with, as rows: fp32 [num, r, n or m]."""
        return torch.stack([self._start(layer, step, batch.device, factor).mT for layer in batch.layers])

    def _start(self, layer: Layer, step: Step, device: torch.device, factor: Factor = "last_q") -> torch.Tensor:
        """A factor to begin with, fp32 [n or m, r]: the last one, or numbers in [-1, 1) that all ranks share.

        A column that became zero finds nothing by itself, and is drawn anew.
        """
        last = step.memory.get(factor, layer.id) if self.warm_start else None
        if last is not None and last.any(0).all():
            return last.to(device)
        shape = matrix_shape(layer)[factor == "last_q"], self._rank_of(layer)
        drawn = 2 * uniform_numbers(seed_for(layer, step, per_rank=False), math.prod(shape), device).view(shape) - 1
        return drawn if last is None else torch.where(last.to(device).any(0), last.to(device), drawn)

    def _rank_of(self, layer: Layer) -> int:
        return min(self.rank, *matrix_shape(layer))


def matrix_shape(layer: Layer) -> tuple[int, int]:
    """(n, m): a weight as a matrix, its first axis against all others."""
    return layer.shape[0], layer.numel // layer.shape[0]


@dataclasses.dataclass(kw_only=True, eq=False)
class _Batch:
    """Matrices of one shape.

    Attributes:
        layers: one per matrix.
        xs: their gradients, fp32 [n, m] each.
        updates: where their updates go, floating [n, m] each.
    """

    layers: list[Layer]
    xs: list[torch.Tensor]
    updates: list[torch.Tensor]

    @property
    def device(self) -> torch.device:
        return self.xs[0].device

    def times(self, rows: torch.Tensor, factor: Factor) -> torch.Tensor:
        """The other factors: of P as rows [num, r, n] all Q as rows [num, r, m], or of Q all P.

        A GPU multiplies them as a batch; on a CPU laying the matrices side by side would cost as much as the products.
        """
        xs = self.xs if factor == "last_p" else [x.mT for x in self.xs]
        if rows.is_cuda:
            return rows @ torch.stack(xs)
        return torch.stack([row @ x for row, x in zip(rows, xs, strict=True)])

    def write_products(self, p: torch.Tensor, q: torch.Tensor) -> None:
        """Every update becomes its P^T Q, of rows [num, r, n] and [num, r, m]."""
        for left, right, update in zip(p, q, self.updates, strict=True):
            if update.dtype == left.dtype:
                torch.mm(left.mT, right, out=update)
            else:
                update.copy_(left.mT @ right)

    def keep(self, rows: torch.Tensor, factor: Factor, step: Step) -> None:
        """Remember a factor for the next step."""
        for layer, row in zip(self.layers, rows, strict=True):
            step.memory.propose(factor, layer.id, row.mT.contiguous())


def _by_shape(compressed: Given, updates: Sequence[torch.Tensor]) -> list[_Batch]:
    batches: dict[tuple[int, int], _Batch] = {}
    for (layer, x), update in zip(compressed, updates, strict=True):
        shape = matrix_shape(layer)
        batch = batches.setdefault(shape, _Batch(layers=[], xs=[], updates=[]))
        batch.layers.append(layer)
        batch.xs.append(x.view(shape))
        batch.updates.append(update.view(shape))
    return list(batches.values())


def _orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows that span the same spaces, [num, r, length], contiguous."""
    columns: torch.Tensor = torch.linalg.qr(rows.mT).Q
    return columns.mT.contiguous()


def _averaged(tensors: list[torch.Tensor], average: Average) -> list[torch.Tensor]:
    """The means over ranks of several tensors, in one message; no message where there is nothing to send."""
    if not tensors:
        return []
    parts = torch.split(average(torch.cat([t.reshape(-1) for t in tensors])), [t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
