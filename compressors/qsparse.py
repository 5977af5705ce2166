"""Quantised top-k: sends the largest entries of every layer, each as a sign and one of eight magnitudes.

Source: Basu et al. 2019 (Qsparse-local-SGD, arXiv:1906.02367): top-k and quantisation composed, with error feedback.
Differs: the magnitudes form a geometric sequence from the smallest entry sent to the largest, and each entry is rounded
to the nearest one; every step is sent, not the sum of several (strategy `local` does that).
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from typing_extensions import override

from collectives.payloads.base import Payload
from collectives.payloads.sparse import LARGEST, NUM_LEVELS, SparseLevels
from compressors.base import NonFiniteSum
from compressors.kernels.quantisation import pack_nearest_levels
from compressors.kernels.residuals import add_and_top_k
from compressors.kernels.selection import largest_magnitude, magnitude_range, top_k
from compressors.layer import Layer, Step
from compressors.topk import ShareSparsifier, num_kept

# Relative error of the largest magnitude, which is decoded as the last of eight products.
TOP_ROUNDOFF = 1e-6


@dataclasses.dataclass(kw_only=True)
class QSparse(ShareSparsifier):
    """Quantised top-k: sends the entries of `topk` with four bits per value, about half its bytes at ratio=0.01.

    The rounding error stays in the residual. Sums of such values need more bits: through `ring` they grow to fp32, so
    use `allgather`, which sums nothing on the way.

    Bytes: 24 + min over index codings (indices) + ceil(k / 2) per layer.
    """

    sends: ClassVar[type[Payload]] = SparseLevels
    notices_nonfinite: ClassVar[bool] = True

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        return self._sparse(x, top_k(x, num_kept(self.density(step), x.numel())), step)

    @override
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload:
        (gradient,) = gradients
        positions, values = add_and_top_k(gradient, residual, num_kept(self.density(step), layer.numel), left)
        if largest_magnitude(values) == math.inf:  # entries that are not finite are among the largest
            raise NonFiniteSum
        payload = self._sparse_values(layer.numel, positions, values, step)
        payload.subtract_from_(left)
        return payload

    @override
    def _sparse_values(self, numel: int, indices: torch.Tensor, values: torch.Tensor, step: Step) -> SparseLevels:
        low, high = magnitude_range(values)
        if low == 0:
            indices, values = indices[values != 0], values[values != 0]
            if not len(values):
                return SparseLevels(numel, indices, 0.0, 0.0, values.new_empty(0, dtype=torch.uint8))
            low, high = magnitude_range(values)
        low, high = min(low, LARGEST), min(high, LARGEST)
        ratio = max(1.0, ctypes.c_float((high / low) ** (1 / (NUM_LEVELS - 1))).value)
        return SparseLevels(numel, indices, low, ratio, pack_nearest_levels(values, low, ratio))

    def contraction_bound(self, layer: Layer) -> float:
        """Return 1 - 1 / m: the largest entry arrives unchanged, and the others lose at most their own magnitude."""
        return 1 - (1 - TOP_ROUNDOFF**2) / layer.numel

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return SparseLevels.packed_nbytes(layer.numel, num_kept(self.ratio, layer.numel))
