"""Muon: steps along a momentum whose singular values are all made about 1.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), KellerJordan/Muon on GitHub;
scale=match_rms_adamw from Liu et al., "Muon is scalable for LLM training" (2025); coefficients=polar_express from Amsel
et al., "The Polar Express" (2025), with the numbers of microsoft/dion on GitHub.
Differs: a convolution is one matrix [out, in * kernel]; products are in fp32 on CPUs, where bf16 is slow.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from typing_extensions import Doc, override

from bench.optimizers.matrices import MatrixOptimizer, MatrixSteps, as_matrix, weight_of
from collectives.options import Count
from collectives.transport.messages import broadcast_wire_
from compressors.layer import Layer
from gradwire.exchange.communicator import CompressedCommunicator

Coefficients = Literal["quintic", "polar_express"]

# Coefficients (a, b, c) of the first iterations; all later ones use the last. A singular value s becomes
# a s + b s^3 + c s^5.
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
# The norm is divided by this as well, because the polynomials of Polar Express must not get values above 1 / 1.02.
_MARGINS: dict[Coefficients, float] = {"quintic": 1.0, "polar_express": 1.02}
_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda out, rest: math.sqrt(max(1.0, out / rest)),
    "match_rms_adamw": lambda out, rest: 0.2 * math.sqrt(max(out, rest)),
    "spectral": lambda out, rest: math.sqrt(out / rest),
}


def orthogonalised(matrix: torch.Tensor, iterations: int, coefficients: Coefficients = "quintic") -> torch.Tensor:
    """Return U p(S) V^T for the matrix U S V^T / norm, by Newton-Schulz iterations in the matrix's dtype.

    p is the polynomial of all iterations. For five and S from 0.01 to 1 it lies between 0.68 and 1.14.

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


@dataclasses.dataclass(kw_only=True)
class Muon(MatrixOptimizer):
    """Update hidden matrices by Muon, and embeddings, the output layer and vectors by AdamW.

    Hidden matrices are the weights of linear layers, convolutions and attention, except the output layer: the last
    weight in registration order, unless that is a norm or an embedding (as with tied weights).

    Ranks exchange gradients, through any compressor, and every rank orthogonalises all matrices. With shard=true, rank
    i of n orthogonalises the matrices i, i + n, ... and sends the updated weights to the others.

    Bytes: those of gradients. With shard=true all ranks together also send 4 (n - 1) bytes per element of the hidden
    matrices in every step (column state_bytes_per_step).
    """

    default_lr: ClassVar[float] = 0.02

    nesterov: Annotated[bool, Doc("look ahead along the momentum before orthogonalising")] = True
    scale: Annotated[
        Literal["original", "match_rms_adamw", "spectral"],
        Doc(
            "factor of lr for a matrix [m, n]: sqrt(max(1, m / n)), 0.2 sqrt(max(m, n)) (takes AdamW's lr), or "
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

    @property
    @override
    def exchanges(self) -> bool:
        return self.shard

    @override
    def steps(
        self, layers: Sequence[Layer], hidden: Sequence[Layer], lr: float, channel: CompressedCommunicator | None
    ) -> MuonSteps:
        return MuonSteps(self, layers, hidden, lr, channel)


class MuonSteps(MatrixSteps):
    """Run Muon as a torch optimizer.

    The momentum is kept for all matrices on every rank, so that a run can resume with another number of ranks.

    Args:
        options, layers, hidden, lr: as for `MatrixSteps`.
        channel: connects the ranks that share the work; None if this rank updates all matrices.
    """

    _options: Muon

    def __init__(
        self,
        options: Muon,
        layers: Sequence[Layer],
        hidden: Sequence[Layer],
        lr: float,
        channel: CompressedCommunicator | None,
    ) -> None:
        super().__init__(options, layers, hidden, lr)
        self._channel = channel
        self._rank, self._ranks = (channel.transport.rank, channel.transport.world_size) if channel else (0, 1)
        for weight, layer in ((weight_of(layer), layer) for layer in self._hidden):
            self.state[weight]["momentum"] = torch.zeros_like(as_matrix(weight, layer))

    @override
    def _update_matrices(self, lr: float) -> None:
        options = self._options
        for index, layer in enumerate(self._hidden):
            weight = weight_of(layer)
            if weight.grad is None:
                continue
            gradient = as_matrix(weight.grad, layer)
            momentum = self.state[weight]["momentum"].lerp_(gradient, 1 - options.momentum)
            if index % self._ranks == self._rank:
                direction = gradient.lerp(momentum, options.momentum) if options.nesterov else momentum
                update = orthogonalised(
                    direction.to(self._dtype(direction)), options.newton_schulz, options.coefficients
                )
                self._descend(layer, update, lr, _SCALES[options.scale](*update.shape))
        if self._channel is not None:
            self._share(self._channel)

    def _dtype(self, direction: torch.Tensor) -> torch.dtype:
        precision = self._options.precision
        if precision == "bf16" or (precision == "auto" and direction.is_cuda):
            return torch.bfloat16
        return torch.promote_types(direction.dtype, torch.float32)

    def _share(self, channel: CompressedCommunicator) -> None:
        """Give every rank the matrices that other ranks have updated."""
        with channel.exchanging(), channel.transport.counted_as("state"):
            for owner in range(self._ranks):
                weights = [weight_of(layer) for layer in self._hidden[owner :: self._ranks]]
                if not weights:
                    continue
                flat = torch.cat([weight.flatten() for weight in weights])
                broadcast_wire_(channel.transport, flat, owner)
                for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
                    weight.copy_(part.view_as(weight))
