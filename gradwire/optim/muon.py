"""Muon: steps along a momentum whose singular values are all made about 1.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), KellerJordan/Muon on GitHub;
scale=match_rms_adamw from Liu et al., "Muon is scalable for LLM training" (2025); coefficients=polar_express from Amsel
et al., "The Polar Express" (2025), with the numbers of microsoft/dion on GitHub.
Differs: a convolution is one matrix [out, in * kernel]; products are in fp32 on CPUs, where bf16 is slow.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from typing_extensions import Doc, override

from collectives.options import Count
from collectives.transport.messages import broadcast_wire_
from gradwire.exchange.communicator import CompressedCommunicator, set_parts_
from gradwire.optim.base import Trained, weight_of
from gradwire.optim.matrices import MatrixOptimizer, MatrixOptions, descend_, rows_of

Coefficients = Literal["quintic", "polar_express"]
MatrixScale = Literal["original", "match_rms_adamw", "spectral"]

# Coefficients (a, b, c) of the first iterations; all later iterations use the last triple. A singular value s becomes a
# s + b s^3 + c s^5.
_ITERATIONS: dict[Coefficients, Sequence[tuple[float, float, float]]] = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
# The matrix is also divided by this margin, because the polynomials of Polar Express must not get values above 1 /
# 1.02.
_MARGINS: dict[Coefficients, float] = {"quintic": 1.0, "polar_express": 1.02}
_SCALES: dict[MatrixScale, Callable[[int, int], float]] = {
    "original": lambda out, rest: math.sqrt(max(1.0, out / rest)),
    "match_rms_adamw": lambda out, rest: 0.2 * math.sqrt(max(out, rest)),
    "spectral": lambda out, rest: math.sqrt(out / rest),
}


def orthogonalised(matrix: torch.Tensor, iterations: int, coefficients: Coefficients = "quintic") -> torch.Tensor:
    """Return U p(S) V^T for the matrix U S V^T / norm, by Newton-Schulz iterations in the matrix's dtype.

    p is the composed polynomial of all iterations. For five iterations and S from 0.01 to 1, p(S) lies between 0.68 and
    1.14.

    Args:
        matrix: [rows, columns].
        iterations: number of iterations.
        coefficients: the polynomial of each iteration.
    """
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() * _MARGINS[coefficients]).clamp(min=1e-7)
    known = _ITERATIONS[coefficients]
    for a, b, c in itertools.islice(itertools.chain(known, itertools.repeat(known[-1])), iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@torch.no_grad()
def muon_update(
    X: torch.Tensor,
    G: torch.Tensor,
    M: torch.Tensor,
    lr: float,
    mu: float,
    *,
    weight_decay: float = 0.0,
    nesterov: bool = True,
    scale: MatrixScale = "original",
    newton_schulz: int = 5,
    coefficients: Coefficients = "quintic",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Update one matrix: M = mu M + (1 - mu) G; X -= lr scale(out, rest) U V^T, where M = U S V^T (approximately).

    Args:
        X: the weight, [out, ...], treated as a matrix [out, rest]; updated in place.
        G: the gradient of X, [out, ...].
        M: the momentum of X, [out, rest], updated in place.
        lr: the learning rate.
        mu: share of the momentum that a step keeps.
        weight_decay: share of X removed per step, times lr.
        nesterov: orthogonalise mu M + (1 - mu) G instead of M.
        scale: how the factor of lr depends on the shape; see `MuonOptions`.
        newton_schulz: number of iterations.
        coefficients: the polynomial of each iteration.
        dtype: dtype of the iterations.
    """
    G = G.flatten(1)
    M.lerp_(G, 1 - mu)
    direction = G.lerp(M, mu) if nesterov else M
    update = orthogonalised(direction.to(dtype), newton_schulz, coefficients)
    descend_(X, update, lr, _SCALES[scale](*update.shape), weight_decay)


@dataclasses.dataclass(kw_only=True)
class MuonOptions(MatrixOptions, name="muon"):
    """Updates hidden matrices by Muon, and embeddings, the output layer and vectors by AdamW.

    Hidden matrices are the weights of linear layers, convolutions and attention, except the output layer: the last
    weight in registration order, unless that is a norm or an embedding (as with tied weights).

    Ranks exchange gradients, through any compressor, and every rank orthogonalises all matrices. With shard=true, rank
    i of n orthogonalises the matrices i, i + n, ... and sends the updated weights to the others.

    Bytes: those of the gradients. With shard=true all ranks together also send 4 (n - 1) bytes per element of the
    hidden matrices in every step (column state_bytes_per_step).
    """

    nesterov: Annotated[bool, Doc("look ahead along the momentum before orthogonalising")] = True
    scale: Annotated[
        MatrixScale,
        Doc(
            "factor of lr for a matrix [m, n]: sqrt(max(1, m / n)), 0.2 sqrt(max(m, n)) (use AdamW's lr), or "
            "sqrt(m / n)"
        ),
    ] = "original"
    newton_schulz: Annotated[Count, Doc("iterations that orthogonalise the momentum")] = 5
    coefficients: Annotated[Coefficients, Doc("polynomial of the iterations")] = "quintic"
    precision: Annotated[
        Literal["auto", "fp32", "bf16"], Doc("type of the iterations; auto: bf16 on GPUs, fp32 on CPUs")
    ] = "auto"
    shard: Annotated[bool, Doc("divide the matrices among the ranks, which send each other the updated weights")] = (
        False
    )


class Muon(MatrixOptimizer):
    """Muon for hidden matrices, AdamW for all other parameters; gradients must already be averaged over ranks.

    The state of a matrix is its momentum [out, rest], in the weight's dtype. Every rank keeps the whole state, so that
    a run can resume with another number of ranks.

    Args:
        model: the network; or only its parameters, where every parameter with two or more dimensions counts as a hidden
            matrix.
        lr: the learning rate of matrices, before any schedule.
        group: with shard=True, the process group of the ranks that divide the work; None for the default group.
        timeout_s: longest wait for any one message, in seconds.
        communicator: replaces `group` and `timeout_s`; the caller closes it.
        options: `MuonOptions`.

    Raises:
        OptionError: an option is unknown or out of range, or the model has no hidden matrices.
    """

    _options: MuonOptions

    def __init__(
        self,
        model: Trained,
        lr: float = MuonOptions.default_lr,
        *,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        communicator: CompressedCommunicator | None = None,
        **options: Any,
    ) -> None:
        chosen = MuonOptions.from_text(options)
        super().__init__(model, lr, chosen)
        if chosen.shard:
            self.communicator = communicator or self.open_communicator(self.network, "none", "native", group, timeout_s)

    @override
    def update_matrices(self, lr: float) -> None:
        options, ranks = self._options, self.communicator.transport if self.communicator else None
        rank, world_size = (ranks.rank, ranks.world_size) if ranks else (0, 1)
        for index, layer in enumerate(self.hidden):
            weight = weight_of(layer)
            if weight.grad is None:
                continue
            X, G, M = rows_of(weight, layer), rows_of(weight.grad, layer), self.state[weight]["momentum"]
            if index % world_size != rank:
                M.lerp_(G.flatten(1), 1 - options.momentum)
                continue
            muon_update(
                X,
                G,
                M,
                lr,
                options.momentum,
                weight_decay=options.weight_decay,
                nesterov=options.nesterov,
                scale=options.scale,
                newton_schulz=options.newton_schulz,
                coefficients=options.coefficients,
                dtype=self._dtype(M),
            )
        if self.communicator is not None:
            self._share(self.communicator)

    def _dtype(self, momentum: torch.Tensor) -> torch.dtype:
        precision = self._options.precision
        if precision == "bf16" or (precision == "auto" and momentum.is_cuda):
            return torch.bfloat16
        return torch.promote_types(momentum.dtype, torch.float32)

    def _share(self, communicator: CompressedCommunicator) -> None:
        """Send the matrices that this rank has updated to all ranks, and receive the others."""
        transport = communicator.transport
        with communicator.exchanging(), transport.counted_as("state"):
            for owner in range(transport.world_size):
                weights = [weight_of(layer) for layer in self.hidden[owner :: transport.world_size]]
                if not weights:
                    continue
                flat = torch.cat([weight.flatten() for weight in weights])
                broadcast_wire_(transport, flat, owner)
                set_parts_(weights, flat)
