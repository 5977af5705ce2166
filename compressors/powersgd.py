"""PowerSGD: every matrix as a product of two thin ones, found by a step of power iteration that all ranks share.

Source: Vogels, Karimireddy, Jaggi 2019 (arXiv:1905.13727), algorithms 1 and 2; the residual is the compensated
gradient less the common reconstruction, as in the paper's code and in PyTorch's hook.
Differs: state belongs to parameters, not to buckets, so the engine may regroup them; matrices of one shape are
multiplied and orthogonalised as a batch, each by itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt
from typing_extensions import Doc

from collectives.base import Collective
from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.dense import Dense
from compressors.base import FP32_BYTES, LossyCompressor
from compressors.kernels.random import generator_for
from compressors.layer import Bucket, Layer, Sent, Step
from compressors.state import LayerDict, Store
from compressors.unit import Unit, units_of


@dataclasses.dataclass(kw_only=True)
class PowerSgd(LossyCompressor):
    """A gradient [n, m] becomes P [n, r] and Q [m, r], r = approx_rank; the rest is sent in fp32.

    Two messages per bucket: all P and what is not compressed, then all Q. Both are plain sums, so any collective
        carries them.

    Bytes: 16 + 4 (sum of r n + elements not compressed) + 16 + 4 (sum of r m) for a bucket; the second message only
    where something is compressed.
    """

    shared_randomness: ClassVar[bool] = True

    approx_rank: Annotated[int, Ge(1), Doc("r, columns of the two thin matrices")] = 2
    min_compression_rate: Annotated[float, Gt(0), Doc("compress where n m / (r (n + m)) exceeds this")] = 2.0
    warm_start: Annotated[bool, Doc("go on from the last step's Q; else draw it anew")] = True
    dense_steps: Annotated[int, Ge(0), Doc("first optimizer steps in which everything is sent")] = 0
    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last_q = LayerDict()

    def leaves_dense(self, layer: Layer) -> bool:
        """What the policy names, and what two thin matrices would not shrink enough."""
        if super().leaves_dense(layer) or len(layer.shape) < 2 or layer.numel == 0:
            return True
        return self._factor_numel(layer) * self.min_compression_rate >= layer.numel

    def contraction_bound(self, layer: Layer) -> float:
        """1 - r / min(n, m) in expectation where Q is drawn anew; 1 where a gradient may lie across the last Q.

        P P^T X is the best approximation of X by columns of X Q, so it loses no more than X Q Q^T, which keeps
        |X Q|^2 for an orthonormal Q: r / m of |X|^2 on average, and r / n likewise where X has fewer rows than columns,
        for only the part of Q in its row space counts.
        """
        return 1.0 if self.warm_start else 1 - self._rank_of(layer) / min(matrix_shape(layer))

    def expected_nbytes(self, layer: Layer) -> int:
        """Both messages of a bucket of this layer alone."""
        return 2 * HEADER_BYTES + FP32_BYTES * self._factor_numel(layer)

    def expected_bucket_nbytes(self, layers: Sequence[Layer]) -> int:
        """Both messages."""
        rest = sum(layer.numel for layer in layers if self.leaves_dense(layer))
        factors = sum(self._factor_numel(layer) for layer in layers if not self.leaves_dense(layer))
        num_messages = 2 if factors else 1 if rest else 0
        return num_messages * HEADER_BYTES + FP32_BYTES * (factors + rest)

    def reduce(self, bucket: Bucket, collective: Collective) -> None:
        """As the base class says, in two rounds."""
        started = time.perf_counter()
        everything = bucket.step.index < self.dense_steps
        units = units_of(bucket, "layer", lambda layer: everything or self.leaves_dense(layer))
        rest = [unit for unit in units if unit.dense]
        batches = self._batches([unit for unit in units if not unit.dense], bucket.step)
        mean = _MeanOverRanks(bucket, collective)

        first = mean([batch.x @ batch.q for batch in batches] + [self._uncompressed(unit) for unit in rest])
        ps = [torch.linalg.qr(p).Q for p in first[: len(batches)]]
        qs = mean([batch.x.mT @ p for batch, p in zip(batches, ps, strict=True)])
        for batch, p, q in zip(batches, ps, qs, strict=True):
            self._finish_batch(batch, p @ q.mT, q)
        for unit, update in zip(rest, first[len(batches) :], strict=True):
            unit.scatter_to_gradients(update.view(-1))

        bucket.encode_s = time.perf_counter() - started - mean.seconds
        numel = sum(unit.numel for unit in units)
        for unit in units:
            seconds = bucket.encode_s * unit.numel / numel
            bucket.sent += [self._sent(layer, unit, seconds * layer.numel / unit.numel) for layer in unit.layers]

    def _batches(self, units: list[Unit], step: Step) -> list[_Batch]:
        """The units by shape, compensated, with an orthonormal Q each."""
        by_shape: dict[tuple[int, int], list[Unit]] = {}
        for unit in units:
            by_shape.setdefault(matrix_shape(unit.layer), []).append(unit)
        batches = []
        for shape, members in by_shape.items():
            flat = [self._compensate(unit, step) for unit in members]
            qs = torch.stack([self._start(unit.layer, step, unit.gradients[0].device) for unit in members])
            x = torch.stack([each.view(shape) for each in flat])
            batches.append(_Batch(units=members, flat=flat, x=x, q=torch.linalg.qr(qs).Q))
        return batches

    def _start(self, layer: Layer, step: Step, device: torch.device) -> torch.Tensor:
        """Q to begin with, fp32 [m, r]: the last step's, or standard normal numbers that all ranks share."""
        last = self._last_q.get(layer.id) if self.warm_start else None
        if last is not None:
            return last.to(device)
        generator = generator_for(layer, step, torch.device("cpu"), per_rank=False)
        return torch.randn(matrix_shape(layer)[1], self._rank_of(layer), generator=generator).to(device)

    def _finish_batch(self, batch: _Batch, update: torch.Tensor, q: torch.Tensor) -> None:
        """Lay the reconstruction [num, n, m] into the gradients; propose residuals and the next Q."""
        for index, unit in enumerate(batch.units):
            flat = update[index].reshape(-1)
            if self.keeps_residual:
                batch.flat[index].sub_(flat)
            if self.warm_start:
                self._last_q.propose(unit.layer.id, q[index].clone())
            unit.scatter_to_gradients(flat)

    def _sent(self, layer: Layer, unit: Unit, seconds: float) -> Sent:
        num_entries = layer.numel if unit.dense else self._factor_numel(layer)
        return Sent(
            layer=layer, payload="Dense", nbytes=FP32_BYTES * num_entries, num_entries=num_entries, seconds=seconds
        )

    def _rank_of(self, layer: Layer) -> int:
        return min(self.approx_rank, *matrix_shape(layer))

    def _factor_numel(self, layer: Layer) -> int:
        """Elements of P and Q together."""
        return self._rank_of(layer) * sum(matrix_shape(layer))

    def _stores(self) -> dict[str, Store]:
        return super()._stores() | {"last_q": self._last_q}


def matrix_shape(layer: Layer) -> tuple[int, int]:
    """(n, m): a weight as a matrix, its first axis against all others."""
    return layer.shape[0], layer.numel // layer.shape[0]


@dataclasses.dataclass(kw_only=True, eq=False)
class _Batch:
    """Matrices of one shape.

    Attributes:
        units: one per matrix.
        flat: their compensated gradients, fp32 [n m] each; the proposed residuals' memory where those are kept.
        x: the same as fp32 [num, n, m].
        q: fp32 [num, m, r], orthonormal columns.
    """

    units: list[Unit]
    flat: list[torch.Tensor]
    x: torch.Tensor
    q: torch.Tensor


class _MeanOverRanks:
    """The mean over ranks of several tensors in one message, and the seconds that took."""

    def __init__(self, bucket: Bucket, collective: Collective) -> None:
        self.seconds = 0.0
        self._bucket = bucket
        self._collective = collective

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not tensors:
            return []
        message = Dense(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        started = time.perf_counter()
        total = self._collective.sum(message, self._bucket.key)
        self.seconds += time.perf_counter() - started
        mean = torch.zeros(message.numel, device=total.device)
        total.add_to_(mean, divisor=self._bucket.step.world_size)
        parts = torch.split(mean, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
