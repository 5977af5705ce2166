"""PowerSGD: every matrix as a product of two thin ones, found by a step of power iteration that all ranks share.

Source: Vogels, Karimireddy, Jaggi 2019 (arXiv:1905.13727), algorithms 1 and 2; the residual is the compensated
gradient less the common reconstruction, as in the paper's code and in PyTorch's hook.
Differs: state belongs to parameters, not to buckets, so the engine may regroup them; matrices of one shape are
multiplied and orthogonalised as a batch, each by itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from typing_extensions import Doc, override

from collectives.payloads.base import HEADER_BYTES
from collectives.ranges import Count, CountOrZero, Positive
from compressors.base import FP32_BYTES, Average, Given, LossyCompressor
from compressors.kernels.random import seed_for, uniform_numbers
from compressors.layer import Layer, Step

LAST_Q = "last_q"


@dataclasses.dataclass(kw_only=True)
class PowerSgd(LossyCompressor):
    """A gradient [n, m] becomes P [n, r] and Q [m, r], r = approx_rank; the rest is sent in fp32.

    Two messages per bucket: all P and what is not compressed, then all Q. Both are plain sums, so any collective
        carries them.

    Bytes: 16 + 4 (sum of r n + elements not compressed) + 16 + 4 (sum of r m) for a bucket; the second message only
    where something is compressed.
    """

    several_rounds: ClassVar[bool] = True

    approx_rank: Annotated[Count, Doc("r, columns of the two thin matrices")] = 2
    min_compression_rate: Annotated[Positive, Doc("compress where n m / (r (n + m)) exceeds this")] = 2.0
    warm_start: Annotated[bool, Doc("go on from the last step's Q; else draw it anew")] = True
    dense_steps: Annotated[CountOrZero, Doc("first optimizer steps in which everything is sent")] = 0
    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True

    def leaves_dense(self, layer: Layer) -> bool:
        """What the policy names, and what two thin matrices would not shrink enough."""
        if super().leaves_dense(layer) or len(layer.shape) < 2 or layer.numel == 0:
            return True
        return self.num_exchanged(layer) * self.min_compression_rate >= layer.numel

    def contraction_bound(self, layer: Layer) -> float:
        """1 - r / min(n, m) in expectation where Q is drawn anew; 1 where a gradient may lie across the last Q.

        P P^T X is the best approximation of X by columns of X Q, so it loses no more than X Q Q^T, which keeps
        |X Q|^2 for an orthonormal Q: r / m of |X|^2 on average, and r / n likewise where X has fewer rows than columns,
        for only the part of Q in its row space counts.
        """
        return 1.0 if self.warm_start else 1 - self._rank_of(layer) / min(matrix_shape(layer))

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return 2 * HEADER_BYTES + FP32_BYTES * self.num_exchanged(layer)

    @override
    def expected_bucket_nbytes(self, layers: Sequence[Layer]) -> int:
        rest = sum(layer.numel for layer in layers if self.leaves_dense(layer))
        factors = sum(self.num_exchanged(layer) for layer in layers if not self.leaves_dense(layer))
        num_messages = 2 if factors else 1 if rest else 0
        return num_messages * HEADER_BYTES + FP32_BYTES * (factors + rest)

    @override
    def is_dense_at(self, step_index: int) -> bool:
        return step_index < self.dense_steps

    @override
    def reduce(
        self, compressed: Given, rest: Sequence[torch.Tensor], step: Step, average: Average
    ) -> list[torch.Tensor]:
        """Two rounds: all P and the rest, then all Q."""
        batches = self._batches(compressed, step)
        first = _averaged([batch.x @ batch.q for batch in batches] + list(rest), average)
        ps = [torch.linalg.qr(p).Q for p in first[: len(batches)]]
        qs = _averaged([batch.x.mT @ p for batch, p in zip(batches, ps, strict=True)], average)
        updates: dict[int, torch.Tensor] = {}
        for batch, p, q in zip(batches, ps, qs, strict=True):
            for layer, last_q, update in zip(batch.layers, q, p @ q.mT, strict=True):
                updates[layer.id] = update.reshape(-1)
                if self.warm_start:
                    step.memory.propose(LAST_Q, layer.id, last_q.clone())
        return [updates[layer.id] for layer, _ in compressed] + first[len(batches) :]

    @override
    def num_exchanged(self, layer: Layer) -> int:
        return self._rank_of(layer) * sum(matrix_shape(layer))

    def _batches(self, compressed: Given, step: Step) -> list[_Batch]:
        """The layers by shape, with an orthonormal Q each."""
        by_shape: dict[tuple[int, int], list[tuple[Layer, torch.Tensor]]] = {}
        for layer, x in compressed:
            by_shape.setdefault(matrix_shape(layer), []).append((layer, x))
        batches = []
        for shape, members in by_shape.items():
            qs = torch.stack([self._start(layer, step, x.device) for layer, x in members])
            xs = torch.stack([x.view(shape) for _, x in members])
            batches.append(_Batch(layers=[layer for layer, _ in members], x=xs, q=torch.linalg.qr(qs).Q))
        return batches

    def _start(self, layer: Layer, step: Step, device: torch.device) -> torch.Tensor:
        """Q to begin with, fp32 [m, r]: the last step's, or numbers in [-1, 1) that all ranks share.

        A column that became zero finds nothing by itself, and is drawn anew.
        """
        last = step.memory.get(LAST_Q, layer.id) if self.warm_start else None
        if last is not None and last.any(0).all():
            return last.to(device)
        shape = matrix_shape(layer)[1], self._rank_of(layer)
        drawn = 2 * uniform_numbers(seed_for(layer, step, per_rank=False), math.prod(shape), device).view(shape) - 1
        return drawn if last is None else torch.where(last.to(device).any(0), last.to(device), drawn)

    def _rank_of(self, layer: Layer) -> int:
        return min(self.approx_rank, *matrix_shape(layer))


def matrix_shape(layer: Layer) -> tuple[int, int]:
    """(n, m): a weight as a matrix, its first axis against all others."""
    return layer.shape[0], layer.numel // layer.shape[0]


@dataclasses.dataclass(kw_only=True, eq=False)
class _Batch:
    """Matrices of one shape.

    Attributes:
        layers: one per matrix.
        x: their gradients, fp32 [num, n, m].
        q: fp32 [num, m, r], orthonormal columns.
    """

    layers: list[Layer]
    x: torch.Tensor
    q: torch.Tensor


def _averaged(tensors: list[torch.Tensor], average: Average) -> list[torch.Tensor]:
    """The means over ranks of several tensors, in one message; no message where there is nothing to send."""
    if not tensors:
        return []
    parts = torch.split(average(torch.cat([t.reshape(-1) for t in tensors])), [t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
