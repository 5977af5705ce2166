"""Dion: orthonormal low-rank steps; ranks exchange the factors of their momentum, not gradients.

Source: Ahn et al., "Dion: Distributed orthonormalized updates" (2025, arXiv:2504.05295), algorithm 2, and
microsoft/dion on GitHub.
Differs: rank_fraction is 0.25 instead of 1, with which as much is sent as without compression; P is orthonormalised by
QR with a positive diagonal of R, instead of a randomised Cholesky QR, so that all ranks get the same signs;
convolutions are matrices [out, in * kernel].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, cast

import torch
from annotated_types import Gt, Le
from typing_extensions import Doc, override

from bench.core import spec
from bench.optimizers.matrices import MatrixOptimizer, MatrixSteps, as_matrix, weight_of
from collectives.base import Collective, without_residuals
from collectives.options import Incompatible, PositiveOrZero, incompatibility
from collectives.payloads import Dense
from compressors.base import Compressor
from compressors.floats import Bf16, NoCompression
from compressors.layer import Layer
from gradwire.exchange.communicator import CompressedCommunicator


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return the Q of the QR decomposition whose R has a positive diagonal, computed in fp32 or more.

    The signs of other decompositions differ between machines. A matrix of zeros gives zeros.

    Args:
        matrix: [rows, columns], with at least as many rows as columns.
    """
    q, r = torch.linalg.qr(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))
    q = q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(q)
    return torch.where(r.any(), q, 0.0).to(matrix.dtype)


@dataclasses.dataclass(kw_only=True)
class Dion(MatrixOptimizer):
    """Update hidden matrices by Dion, and embeddings, the output layer and vectors by AdamW.

    Hidden matrices are chosen as by muon. Every rank keeps a momentum M of its own gradients. Per step, matrix [m, n]
    with m >= n (others are transposed) and rank k = ceil(rank_fraction n):

    M += gradient; P = orthonormal(mean over ranks of M Q); W = mean over ranks of M^T P; M -= (1 - momentum) P W^T;
    Q = W with columns of length 1; weight -= lr sqrt(out / in) P Q^T.

    What was not sent stays in M (error feedback), and the mean of M over ranks is the M that the mean gradient would
    give. Other parameters, and matrices for which (m + n) k >= m n, exchange gradients uncompressed.

    Bytes: 4 (m + n) k per matrix, 4 per element of all else, in two exchanges, of which the second needs the first's
    result; with compressor bf16 half of that.
    """

    default_lr: ClassVar[float] = 0.02

    weight_decay: Annotated[PositiveOrZero, Doc("share of a matrix removed per step, times lr")] = 0.01
    rank_fraction: Annotated[
        float, Gt(0), Le(1), Doc("rank of the factors / smaller side of the matrix; 1: exchange gradients")
    ] = 0.25

    @property
    @override
    def keeps_gradients(self) -> bool:
        return True

    @override
    def check_compatible(self, compressor: Compressor, collective: Collective) -> None:
        name, method = self.component_name, compressor.component_name
        if not isinstance(compressor, NoCompression | Bf16):
            raise Incompatible(
                f"{name} exchanges small factors of its own, which {method} does not encode; use compressor none or "
                "bf16"
            )
        if reason := incompatibility(collective.check_compatible, Dense):
            raise Incompatible(f"{name} sends uncompressed tensors (Dense payloads): {reason}")
        if isinstance(compressor, Bf16) and compressor != Bf16():
            raise Incompatible(
                f"{name} sends everything in bf16 and keeps no residuals of it, so {spec.short_text(compressor)} has "
                "options without effect; use compressor bf16 without options"
            )
        if isinstance(compressor, Bf16) and collective.keeps_residuals:
            raise Incompatible(
                f"{name} sends factors, and {spec.short_text(collective)} keeps residuals of gradients; use "
                f"{without_residuals(collective)}, or compressor none"
            )

    def rank_of(self, rows: int, columns: int) -> int:
        """Return the rank of the factors of a matrix."""
        exact = self.rank_fraction * min(rows, columns)
        return max(1, math.ceil(exact - 1e-9))  # 0.07 * 100 is a little more than 7

    def compresses(self, rows: int, columns: int) -> bool:
        """Return True if ranks exchange factors of a matrix, False if they exchange its gradient."""
        return (rows + columns) * self.rank_of(rows, columns) < rows * columns

    @override
    def steps(
        self, layers: Sequence[Layer], hidden: Sequence[Layer], lr: float, channel: CompressedCommunicator | None
    ) -> DionSteps:
        return DionSteps(self, layers, hidden, lr, channel)


class DionSteps(MatrixSteps):
    """Run Dion as a torch optimizer.

    Its state for a matrix is the momentum M [out, rest], which differs between ranks, and the basis Q [columns, rank],
    where columns is the smaller of out and rest.

    Args:
        options, layers, hidden, lr: as for `MatrixSteps`.
        channel: connects the ranks; None if there is only one.
    """

    _options: Dion

    def __init__(
        self,
        options: Dion,
        layers: Sequence[Layer],
        hidden: Sequence[Layer],
        lr: float,
        channel: CompressedCommunicator | None,
    ) -> None:
        super().__init__(options, layers, hidden, lr)
        self._channel = channel
        self._sends_bf16 = channel is not None and isinstance(channel.reducer.compressor, Bf16)
        self._layers = list(layers)
        self._compressed: list[Layer] = []
        self._whole: list[Layer] = []
        for layer in hidden:
            weight = weight_of(layer)
            matrix = as_matrix(weight, layer)
            rows, columns = _tall(matrix).shape
            (self._compressed if options.compresses(rows, columns) else self._whole).append(layer)
            drawn = torch.Generator().manual_seed(layer.id)  # the same on all ranks
            basis = torch.randn(columns, options.rank_of(rows, columns), generator=drawn, dtype=torch.float64)
            self.state[weight].update(momentum=torch.zeros_like(matrix), basis=basis.to(weight))

    @override
    def _update_matrices(self, lr: float) -> None:
        for weight in map(weight_of, self._layers):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)  # all ranks must exchange the same tensors
        others = [*self._whole, *self._others]
        projected = [self._projected(layer) for layer in self._compressed]
        gradients = [cast(torch.Tensor, weight_of(layer).grad) for layer in others]
        self._mean_([*projected, *gradients], [*self._compressed, *others])
        projected += [self._projected(layer) for layer in self._whole]
        hidden, left = [*self._compressed, *self._whole], [orthonormal(matrix) for matrix in projected]
        right = [_tall(self._state(layer)[0]).T @ matrix for layer, matrix in zip(hidden, left, strict=True)]
        self._mean_(right[: len(self._compressed)], self._compressed)
        for layer, p, w in zip(hidden, left, right, strict=True):
            self._apply(layer, p, w, lr)

    @property
    def residual_nbytes(self) -> int:
        """Return the bytes of the momenta, which hold all that was not sent."""
        return sum(self._state(layer)[0].nbytes for layer in self._compressed)

    def _projected(self, layer: Layer) -> torch.Tensor:
        """Add a layer's gradient to its momentum M, and return M Q, [rows, rank]."""
        momentum, basis = self._state(layer)
        momentum.add_(as_matrix(cast(torch.Tensor, weight_of(layer).grad), layer))
        return _tall(momentum) @ basis

    def _apply(self, layer: Layer, p: torch.Tensor, w: torch.Tensor, lr: float) -> None:
        """Take what was sent out of a layer's momentum, and update its basis and its weight.

        Args:
            layer: the layer.
            p: orthonormal columns, [rows, rank]; zeros if the momentum is zero.
            w: the mean over ranks of M^T p, [columns, rank].
            lr: the learning rate.
        """
        momentum, basis = self._state(layer)
        out, rest = momentum.shape
        _tall(momentum).addmm_(p, w.T, alpha=self._options.momentum - 1)
        basis.copy_(torch.where(w.any(), w / (w.norm(dim=0) + 1e-8), basis))
        self._descend(layer, p @ basis.T if out >= rest else basis @ p.T, lr, math.sqrt(out / rest))

    def _state(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the momentum [out, rest] and the basis [columns, rank] of a layer."""
        state = self.state[weight_of(layer)]
        return state["momentum"], state["basis"]

    def _mean_(self, tensors: Sequence[torch.Tensor], layers: Sequence[Layer]) -> None:
        """Replace tensors, one of each of these layers, with their means over ranks."""
        if self._channel is None or not tensors:
            return
        sent = [tensor.bfloat16() for tensor in tensors] if self._sends_bf16 else tensors
        self._channel.combine_(sent, "mean", layers)
        if self._sends_bf16:
            for tensor, mean in zip(tensors, sent, strict=True):
                tensor.copy_(mean)


def _tall(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix, or its transpose if that has more rows; a view."""
    return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
