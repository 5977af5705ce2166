"""Dion: orthonormal low-rank steps; ranks exchange the factors of their momentum, not gradients.

Source: Ahn et al., "Dion: Distributed orthonormalized updates" (2025, arXiv:2504.05295), algorithm 2, and
microsoft/dion on GitHub.
Differs: rank_fraction is 0.25 instead of 1, because a fraction of 1 sends as much as no compression; P is
orthonormalised by QR with a positive diagonal of R, instead of a randomised Cholesky QR, so that all ranks get the same
signs; convolutions are matrices [out, in * kernel].
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
from annotated_types import Gt, Le
from typing_extensions import Doc, override

from collectives.base import Collective
from collectives.options import PositiveOrZero
from collectives.refusals import Refusal
from compressors.base import Compressor
from compressors.floats import Bf16, NoCompression
from compressors.layer import Layer
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.optim.base import Trained, dense_refusal, weight_of
from gradwire.optim.matrices import MatrixOptimizer, MatrixOptions, descend_, rows_of


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return the Q of the QR decomposition whose R has a positive diagonal, computed in fp32 or more.

    The signs of other decompositions could differ between machines. A matrix of zeros gives zeros.

    Args:
        matrix: [rows, columns], with at least as many rows as columns.
    """
    q, r = torch.linalg.qr(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))
    q = q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(q)
    return torch.where(r.any(), q, 0.0).to(matrix.dtype)


@torch.no_grad()
def dion_update(
    X: Sequence[torch.Tensor],
    G: Sequence[torch.Tensor],
    M: Sequence[torch.Tensor],
    Q: Sequence[torch.Tensor],
    lr: float,
    mu: float,
    weight_decay: float = 0.0,
    mean_: Callable[[Sequence[torch.Tensor]], None] = lambda tensors: None,
) -> None:
    """Update matrices once, by algorithm 2 of the paper, for all matrices of a network together.

    For each matrix, transposed if it has more columns than rows: M += G; P = orthonormal(mean of M Q over ranks);
    W = mean of M^T P over ranks; M -= (1 - mu) P W^T; Q = W with columns of length 1;
    X -= lr sqrt(out / rest) P Q^T.

    Args:
        X: the weights, each [out, ...], updated in place; the rows are those of a matrix [out, rest].
        G: this rank's gradients of the weights, each [out, ...].
        M: this rank's momenta, each [out, rest], updated in place; afterwards they contain what was not sent.
        Q: the bases, each [min(out, rest), rank], equal on all ranks, updated in place.
        lr: the learning rate.
        mu: share of the momentum along P that a step keeps.
        weight_decay: share of X removed per step, times lr.
        mean_: function that replaces tensors, one per matrix, with their means over ranks, in place; called twice.
    """
    for m, g in zip(M, G, strict=True):
        m.add_(g.flatten(1))
    tall = [m if m.shape[0] >= m.shape[1] else m.T for m in M]
    P = [m @ q for m, q in zip(tall, Q, strict=True)]
    mean_(P)
    P = [orthonormal(p) for p in P]
    W = [m.T @ p for m, p in zip(tall, P, strict=True)]
    mean_(W)
    for x, m, p, q, w in zip(X, tall, P, Q, W, strict=True):
        m.addmm_(p, w.T, alpha=mu - 1)
        q.copy_(torch.where(w.any(), w / (w.norm(dim=0) + 1e-8), q))
        out, rest = len(x), x[0].numel()
        descend_(x, p @ q.T if out >= rest else q @ p.T, lr, math.sqrt(out / rest), weight_decay)


@dataclasses.dataclass(kw_only=True)
class DionOptions(MatrixOptions, name="dion"):
    """Updates hidden matrices by Dion, and embeddings, the output layer and vectors by AdamW.

    Hidden matrices are those that muon would update. Every rank keeps a momentum M of its own gradients. In each step,
    for a matrix [m, n] with m >= n (other matrices are transposed) and rank k = ceil(rank_fraction n):

    M += gradient; P = orthonormal(mean over ranks of M Q); W = mean over ranks of M^T P; M -= (1 - momentum) P W^T;
    Q = W with columns of length 1; weight -= lr sqrt(out / in) P Q^T.

    What was not sent stays in M (error feedback), and the mean of M over ranks is the M that the mean gradient would
    give. For other parameters, and for matrices with (m + n) k >= m n, ranks exchange uncompressed gradients.

    Bytes: 4 (m + n) k per matrix, 4 per element of all other parameters, in two exchanges; the second needs the result
    of the first. With compressor bf16, half of these bytes.
    """

    weight_decay: Annotated[PositiveOrZero, Doc("share of a matrix removed per step, times lr")] = 0.01
    rank_fraction: Annotated[
        float, Gt(0), Le(1), Doc("rank of the factors / smaller side of the matrix; 1: exchange gradients")
    ] = 0.25

    def refusals(self, compressor: Compressor, collective: Collective) -> list[Refusal]:
        """Return the reasons why components do not work with these options, as refusals."""
        name, method = self.component_name, compressor.component_name
        is_bf16 = isinstance(compressor, Bf16)
        return [
            Refusal(
                not isinstance(compressor, NoCompression | Bf16),
                f"{name} exchanges small factors of its own, which {method} does not encode",
                [{"compressor": "none"}, {"compressor": "bf16"}],
            ),
            dense_refusal(f"{name} sends uncompressed tensors", collective),
            Refusal(
                is_bf16 and compressor != Bf16(),
                f"{name} sends everything in bf16 and keeps no residuals of it, so {compressor} has options without "
                "effect",
                [{"compressor": "bf16"}],
            ),
            Refusal(
                is_bf16 and collective.keeps_residuals,
                f"{name} sends factors, and {collective} keeps residuals of gradients",
                [{"collective": "allgather"}, {"compressor": "none"}],
            ),
        ]

    def rank_of(self, rows: int, columns: int) -> int:
        """Return the rank of the factors of a matrix."""
        exact = self.rank_fraction * min(rows, columns)
        return max(1, math.ceil(exact - 1e-9))  # because 0.07 * 100 is a little more than 7

    def compresses(self, rows: int, columns: int) -> bool:
        """Return True if ranks exchange factors of a matrix, False if they exchange its gradient."""
        return (rows + columns) * self.rank_of(rows, columns) < rows * columns


class Dion(MatrixOptimizer):
    """Dion for hidden matrices, AdamW for all other parameters; gradients must not be averaged before.

    Dion itself averages the gradients that AdamW uses.

    The state of a matrix is its momentum M [out, rest], which differs between ranks, and the basis Q [columns, rank],
    where columns is the smaller of out and rest. Both have the weight's dtype.

    Args:
        model: the network, the same on all ranks; or only its parameters, where every parameter with two or more
            dimensions counts as a hidden matrix.
        lr: the learning rate of matrices, before any schedule.
        compressor: "none", or "bf16" to send everything in 16 bits; a spec or an instance.
        collective: averages what ranks send; a spec such as "ring", or an instance.
        group: process group of the ranks; None for the default group.
        timeout_s: longest wait for any one message, in seconds.
        communicator: replaces `compressor`, `collective`, `group` and `timeout_s`; the caller closes it.
        options: `DionOptions`.

    Raises:
        OptionError: an option is unknown or out of range, components do not work together, or the model has no hidden
            matrices.
    """

    _options: DionOptions
    communicator: CompressedCommunicator
    keeps_gradients = True

    def __init__(
        self,
        model: Trained,
        lr: float = DionOptions.default_lr,
        *,
        compressor: Compressor | str = "none",
        collective: Collective | str = "native",
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        communicator: CompressedCommunicator | None = None,
        **options: Any,
    ) -> None:
        chosen = DionOptions.from_text(options)
        super().__init__(model, lr, chosen)
        self.communicator = communicator or self.open_communicator(
            self.network, compressor, collective, group, timeout_s, chosen.refusals
        )
        self._sends_bf16 = isinstance(self.communicator.reducer.compressor, Bf16)
        self._compressed: list[Layer] = []
        self._whole: list[Layer] = []
        for layer in self.hidden:
            weight = weight_of(layer)
            out, rest = self.state[weight]["momentum"].shape
            (self._compressed if chosen.compresses(out, rest) else self._whole).append(layer)
            drawn = torch.Generator().manual_seed(layer.id)  # the same on all ranks
            basis = torch.randn(min(out, rest), chosen.rank_of(out, rest), generator=drawn, dtype=torch.float64)
            self.state[weight]["basis"] = basis.to(weight)

    @override
    def update_matrices(self, lr: float) -> None:
        for weight in map(weight_of, self.layers):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)  # all ranks must exchange the same tensors
        others = [*self._whole, *self.others]
        gradients = [cast(torch.Tensor, weight_of(layer).grad) for layer in others]

        def mean_(factors: Sequence[torch.Tensor]) -> None:
            self._mean_([*factors, *gradients], [*self._compressed, *others])
            others.clear()  # the gradients travel with the first factors
            gradients.clear()

        self._update(self._compressed, lr, mean_)
        self._update(self._whole, lr, lambda _: None)

    @property
    @override
    def residual_nbytes(self) -> int:
        return sum(self.state[weight_of(layer)]["momentum"].nbytes for layer in self._compressed)

    def _update(self, layers: Sequence[Layer], lr: float, mean_: Callable[[Sequence[torch.Tensor]], None]) -> None:
        weights = [weight_of(layer) for layer in layers]
        dion_update(
            [rows_of(weight, layer) for weight, layer in zip(weights, layers, strict=True)],
            [rows_of(cast(torch.Tensor, weight.grad), layer) for weight, layer in zip(weights, layers, strict=True)],
            [self.state[weight]["momentum"] for weight in weights],
            [self.state[weight]["basis"] for weight in weights],
            lr,
            self._options.momentum,
            self._options.weight_decay,
            mean_,
        )

    def _mean_(self, tensors: Sequence[torch.Tensor], layers: Sequence[Layer]) -> None:
        """Replace tensors, one for each of these layers, with their means over ranks."""
        if not tensors:
            return
        sent = [tensor.bfloat16() for tensor in tensors] if self._sends_bf16 else tensors
        self.communicator.combine_(sent, "mean", layers)
        if self._sends_bf16:
            for tensor, mean in zip(tensors, sent, strict=True):
                tensor.copy_(mean)
