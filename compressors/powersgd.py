"""PowerSGD: sends every matrix as a product of two thin matrices, found by one step of power iteration.

Source: Vogels, Karimireddy, Jaggi 2019 (arXiv:1905.13727), algorithms 1 and 2; the residual is the gradient (with the
old residual) minus the common reconstruction, as in the paper's code and in PyTorch's hook.
Differs: state belongs to parameters, not to buckets, so DDP may change its buckets; matrices of the same shape are
orthogonalised as a batch. Factors are stored as rows, so that products read the gradient along its rows. Every matrix
is factored, also embeddings and attention matrices, as in the paper's language model; an embedding's rows of zeros cost
as much as its other rows.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from typing_extensions import Doc, override

from collectives.options import Count, CountOrZero, OptionError, Positive
from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.codec.philox import random_words, uniform
from compressors.base import FP32_BYTES, Average, ErrorFeedback, Given, MultiRound, Traits
from compressors.layer import Layer, Step, seed_for

Factor = Literal["last_p", "last_q"]


@dataclasses.dataclass(kw_only=True)
class PowerSgd(MultiRound):
    """PowerSGD: sends a gradient [n, m] as P [n, r] and Q [m, r], where r is `rank`.

    A bucket takes two messages: all P and the layers that are not compressed, then all Q. Both messages are plain sums,
    so any collective can carry them. With `alternate`, P is sent in even steps and Q in odd steps, and each is computed
    from the other factor of the previous step. This takes one message, half the bytes and one product less, but the
    factors follow the gradient half as fast.

    Bytes: 16 + 4 (sum of r n + elements not compressed) + 16 + 4 (sum of r m) for a bucket; the second message is sent
    only if something is compressed. With `alternate` there is one message, with one of the two factors.

    Raises:
        OptionError: alternate=true with warm_start=false.
    """

    rank: Annotated[Count, Doc("r, columns of the two thin matrices")] = 2
    min_compression_rate: Annotated[Positive, Doc("compress where n m / (r (n + m)) exceeds this")] = 2.0
    warm_start: Annotated[bool, Doc("start from the last step's Q; false: start from a random one")] = True
    alternate: Annotated[bool, Doc("send P and Q at alternate steps, instead of both at every step")] = False
    dense_steps: Annotated[CountOrZero, Doc("number of optimizer steps at the start in which everything is sent")] = 0
    error_feedback: ErrorFeedback = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alternate and not self.warm_start:
            raise OptionError(
                "powersgd: alternate=true needs warm_start=true, because each factor is computed from the other factor "
                "of the step before"
            )

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, period=2 if self.alternate else 1)

    @override
    def leaves_dense(self, layer: Layer) -> bool:
        if super().leaves_dense(layer) or len(layer.shape) < 2 or layer.numel == 0:
            return True
        sent_per_step = self._num_both(layer) * (0.5 if self.alternate else 1.0)
        return sent_per_step * self.min_compression_rate >= layer.numel

    def contraction_bound(self, layer: Layer) -> float:
        """Return 1 - r / min(n, m), in expectation, for a random Q; return 1 if `warm_start` is True.

        With warm_start, a gradient may be orthogonal to the last Q. For a random Q: P P^T X is the best approximation
        of X by columns of X Q, so it loses no more than X Q Q^T, which keeps |X Q|^2 for an orthonormal Q. On average,
        |X Q|^2 is r / m of |X|^2, or r / n of it if X has fewer rows than columns, because only the part of Q in the
        row space of X counts.
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
        return (2 if factors else int(rest > 0)) * HEADER_BYTES + FP32_BYTES * (factors + rest)

    @override
    def reduce(
        self,
        compressed: Given,
        rest: Sequence[torch.Tensor],
        step: Step,
        average: Average,
        updates: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        # Average all P and the rest, then all Q; with `alternate`, only this step's factor and the rest.
        batches = _by_shape(compressed, updates)
        known: Factor = "last_p" if self.alternate and step.index % 2 else "last_q"
        # the factors to start from, as rows: fp32 [num, r, n or m]
        starts = [
            [self._start(layer, step, batch.xs[0].device, known).mT for layer in batch.layers] for batch in batches
        ]
        before = [_orthonormal(torch.stack(rows)) for rows in starts]
        found = _averaged(
            [batch.times(rows, known) for batch, rows in zip(batches, before, strict=True)] + list(rest), average
        )
        factors, means = found[: len(batches)], found[len(batches) :]
        ps, qs = (before, factors) if known == "last_p" else (factors, before)
        if not self.alternate:
            ps = [_orthonormal(p) for p in ps]
            qs = _averaged([batch.times(p, "last_p") for batch, p in zip(batches, ps, strict=True)], average)
        for batch, p, q in zip(batches, ps, qs, strict=True):
            for left, right, update in zip(p, q, batch.updates, strict=True):
                if update.dtype == left.dtype:
                    torch.mm(left.mT, right, out=update)
                else:
                    update.copy_(left.mT @ right)
            if self.warm_start:
                kept, rows = ("last_p", p) if self.alternate and known == "last_q" else ("last_q", q)
                for layer, row in zip(batch.layers, rows, strict=True):
                    step.memory.propose(kept, layer.id, row.mT.contiguous())
        return means

    @override
    def num_exchanged(self, layer: Layer, step: Step) -> int:
        if not self.alternate:
            return self._num_both(layer)
        return self._rank_of(layer) * matrix_shape(layer)[step.index % 2]

    def _num_both(self, layer: Layer) -> int:
        return self._rank_of(layer) * sum(matrix_shape(layer))

    def _start(self, layer: Layer, step: Step, device: torch.device, factor: Factor = "last_q") -> torch.Tensor:
        """Return the factor (P or Q) to start from: that of the last step, or random numbers equal on all ranks.

        The result is fp32 [n or m, r]; random numbers lie in [-1, 1). A column of zeros in the last factor would stay
        zero, so it is replaced with random numbers.
        """
        last = step.memory.get(factor, layer.id) if self.warm_start else None
        if last is not None and last.any(0).all():
            return last.to(device)
        shape = matrix_shape(layer)[factor == "last_q"], self._rank_of(layer)
        words = random_words(seed_for(layer, step, per_rank=False), math.prod(shape), device)
        drawn = 2 * uniform(words).view(shape) - 1
        return drawn if last is None else torch.where(last.to(device).any(0), last.to(device), drawn)

    def _rank_of(self, layer: Layer) -> int:
        return min(self.rank, *matrix_shape(layer))


def matrix_shape(layer: Layer) -> tuple[int, int]:
    """Return the shape (n, m) of a weight seen as a matrix: n is its first axis, m the product of all other axes."""
    return layer.shape[0], layer.numel // layer.shape[0]


@dataclasses.dataclass(kw_only=True, eq=False)
class _SameShape:
    """Layers whose matrices have the same shape.

    Attributes:
        layers: one layer per matrix.
        xs: the gradients, fp32 [n, m] each.
        updates: the updates to overwrite, floating [n, m] each.
    """

    layers: list[Layer]
    xs: list[torch.Tensor]
    updates: list[torch.Tensor]

    def times(self, rows: torch.Tensor, factor: Factor) -> torch.Tensor:
        """Compute the other factor of every matrix: from P, [num, r, n], return Q, [num, r, m]; or P from Q.

        A GPU multiplies all matrices as a batch; on a CPU, stacking them would cost as much as the products.

        Args:
            rows: the given factors, stored as rows.
            factor: "last_p" if `rows` are P, "last_q" if they are Q.
        """
        xs = self.xs if factor == "last_p" else [x.mT for x in self.xs]
        if rows.is_cuda:
            return rows @ torch.stack(xs)
        return torch.stack([row @ x for row, x in zip(rows, xs, strict=True)])


def _by_shape(compressed: Given, updates: Sequence[torch.Tensor]) -> list[_SameShape]:
    batches: dict[tuple[int, int], _SameShape] = {}
    for (layer, x), update in zip(compressed, updates, strict=True):
        shape = matrix_shape(layer)
        batch = batches.setdefault(shape, _SameShape(layers=[], xs=[], updates=[]))
        batch.layers.append(layer)
        batch.xs.append(x.view(shape))
        batch.updates.append(update.view(shape))
    return list(batches.values())


def _orthonormal(rows: torch.Tensor) -> torch.Tensor:
    # orthonormal rows that span the same spaces, [num, r, length], contiguous
    columns: torch.Tensor = torch.linalg.qr(rows.mT).Q
    return columns.mT.contiguous()


def _averaged(tensors: list[torch.Tensor], average: Average) -> list[torch.Tensor]:
    # the means over ranks, which take one message, or no message if there are no tensors
    if not tensors:
        return []
    parts = torch.split(average(torch.cat([t.reshape(-1) for t in tensors])), [t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
