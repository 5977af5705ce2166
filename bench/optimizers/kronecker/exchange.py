"""How ranks come to the same Cholesky factors of the mean of their second moments.

- `triangle`: triangles are summed; each mean is factored by one rank, which broadcasts the packed factor.
- `cholesky`: each rank sends the factor of its own damped moment; receivers restore the matrices and sum those, for a
  sum of factors is no factor of the sum. Then every rank factors the mean by itself.
- `dense`: whole matrices are summed, and every rank factors by itself.

Moments travel times a power of two that all ranks agree on, so that in fp16 neither a sum overflows nor the moments of
small gradients vanish. A factor travels as it is; its elements are roots, between that of the damping and 65504.

Source: kfac-pytorch sums triangles likewise (`symmetry_aware`); Pauloski et al., "KAISA" (SC 2021), on owners.
"""

from __future__ import annotations

import math

import torch

from bench.optimizers.kronecker.layer import Moments
from collectives.base import BoundCollective
from collectives.payloads.base import Payload
from collectives.payloads.bundle import Bundle
from collectives.payloads.symmetric import (
    CholeskyFactor,
    Fallback,
    Form,
    encode_symmetric,
    positive_factor,
    relative_damping,
)
from collectives.schedule.layout import leaves
from compressors.ddp.communicator import CompressedCommunicator
from compressors.ddp.report import StepReport

# The largest element of a sum stays below 2^15: fp16 ends at 65504, and is less exact below 2^-14.
_TOP_EXPONENT = 15
_LARGEST_SCALE = 120  # 2^120 is still an fp32 number
_FORMS: dict[Fallback, Form] = {Fallback.TRIANGLE: "triangle", Fallback.DENSE: "dense"}


class MomentExchange:
    """Sums moments and factors their means; its traffic is counted as state.

    Args:
        channel: among the ranks; told what was done.
        collective: bound to its transport; sums the moments.
        transfer: the form in which they travel.
        dtype: the value type in which moments and factors travel.
    """

    def __init__(
        self, channel: CompressedCommunicator, collective: BoundCollective, transfer: Form, dtype: torch.dtype
    ) -> None:
        self._channel = channel
        self._transport = channel.transport
        self._collective = collective
        self._transfer: Form = transfer
        self._dtype = dtype

    def mean(self, moments: Moments) -> Moments | None:
        """The mean over ranks of each, the same bits on all; None where one is not finite. Every rank must call.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        with self._channel.exchanging():
            largest = torch.stack([moment.abs().max() for moment in moments]).tolist()
            is_bad = not all(map(math.isfinite, largest))
            any_bad, *largest = self._transport.all_reduce_scalars([is_bad, *largest])
            self._channel.book(StepReport(factor_fallbacks=0, factor_updates_skipped=int(any_bad)))
            return None if any_bad else self._scaled_mean(moments, largest)

    def factors(self, matrices: Moments, damping: float) -> list[torch.Tensor]:
        """L of each matrix + damping I, the same bits on all ranks. Every rank must call.

        Args:
            matrices: the same on all ranks.
            damping: more of it is taken where this does not make a matrix positive definite.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        if self._transfer == "triangle":
            with self._channel.exchanging():
                payloads = self._broadcast(matrices, damping)
        else:  # every rank factors all of them, and nothing is sent
            payloads = [encode_symmetric(matrix, "cholesky", damping=damping).payload for matrix in matrices]
        self._channel.book(StepReport(factor_fallbacks=sum(_gave_way(payload, damping) for payload in payloads)))
        return [_factor(payload, damping).to(matrix.device) for payload, matrix in zip(payloads, matrices, strict=True)]

    def mean_scalar(self, value: float) -> float:
        """Return the mean over ranks, the same bits on all; every rank must call.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        with self._channel.exchanging():
            (total,) = self._transport.all_reduce_scalars([value], "sum")
        return total / self._transport.world_size

    def _scaled_mean(self, moments: Moments, largest: list[float]) -> Moments:
        """The mean of moments whose elements are at most `largest` on any rank."""
        world_size = self._transport.world_size
        scales = [_scale(world_size * value) for value in largest]
        payloads = self._encoded([moment * scale for moment, scale in zip(moments, scales, strict=True)])
        with self._transport.counted_as("state"):
            total = self._collective.sum(Bundle(payloads), tuple(range(len(moments)))).to_dense()
        parts = total.split([moment.numel() for moment in moments])
        return [
            _symmetrised(part.view_as(moment).to(moment.device)) / (world_size * scale)
            for part, moment, scale in zip(parts, moments, scales, strict=True)
        ]

    def _encoded(self, matrices: Moments) -> list[Payload]:
        """The matrices in the form asked for, or in the one that all ranks can give."""
        dampings = [relative_damping(matrix) for matrix in matrices]
        own = [
            encode_symmetric(matrix, self._transfer, dtype=self._dtype, damping=damping)
            for matrix, damping in zip(matrices, dampings, strict=True)
        ]
        worst = [Fallback(int(level)) for level in self._transport.all_reduce_scalars([e.fallback for e in own])]
        self._channel.book(StepReport(factor_fallbacks=sum(level > Fallback.NONE for level in worst)))
        return [
            encode_symmetric(matrix, _FORMS[level], dtype=self._dtype).payload if level in _FORMS else encoded.payload
            for matrix, encoded, level in zip(matrices, own, worst, strict=True)
        ]

    def _broadcast(self, matrices: Moments, damping: float) -> list[Payload]:
        """Each matrix's factor, from the rank that owns it."""
        shares = owned([len(matrix) for matrix in matrices], self._transport.world_size)
        mine = [  # before any of them is sent, so that all ranks factor at the same time
            encode_symmetric(matrices[index], "cholesky", dtype=self._dtype, damping=damping).payload
            for index in shares[self._transport.rank]
        ]
        received: dict[int, Payload] = {}
        with self._transport.counted_as("state"):
            for owner, indices in enumerate(shares):
                if indices:
                    own = Bundle(mine) if owner == self._transport.rank else None
                    share = self._collective.broadcast(own, owner, tuple(indices))
                    received.update(zip(indices, leaves(share), strict=True))
        return [received[index] for index in range(len(matrices))]


def owned(sizes: list[int], world_size: int) -> list[list[int]]:
    """Which matrices each rank factors: the costliest first, each to the rank that has the least to do."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    costs = [0] * world_size
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = costs.index(min(costs))
        shares[rank].append(index)
        costs[rank] += sizes[index] ** 3
    return shares


def _gave_way(payload: Payload, damping: float) -> bool:
    """Whether a matrix came without a factor, or with more damping than asked for, told in fp32."""
    return not isinstance(payload, CholeskyFactor) or payload.damping > float(torch.tensor(damping))


def _factor(payload: Payload, damping: float) -> torch.Tensor:
    """L, also of a matrix that came without one."""
    if isinstance(payload, CholeskyFactor):
        return payload.factor
    size = math.isqrt(payload.numel)
    return positive_factor(payload.to_dense().view(size, size), floor=damping)


def _scale(largest: float) -> float:
    """The power of two that brings a number, and what is smaller, just below 2^15: multiplying by it is exact."""
    exponent = _TOP_EXPONENT - math.frexp(largest)[1]
    return math.ldexp(1.0, max(-_LARGEST_SCALE, min(exponent, _LARGEST_SCALE)))


def _symmetrised(matrix: torch.Tensor) -> torch.Tensor:
    """Sums of both halves may have been rounded in different orders."""
    return (matrix + matrix.T) / 2
