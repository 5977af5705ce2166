"""Quantised top-k: the largest entries of every layer, each as a sign and one of eight magnitudes.

Source: Basu et al. 2019 (Qsparse-local-SGD, arXiv:1906.02367): top-k and quantisation composed, with error feedback.
Differs: magnitudes are a geometric row from the smallest kept to the largest, and an entry goes to the nearest of them;
a step of its own is sent, not the sum of several (that is strategy `local`).
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
from collectives.payloads.sparse_levels import LARGEST, NUM_LEVELS, SparseLevels
from compressors.base import NonFiniteSum
from compressors.kernels.quantisation import pack_nearest_levels
from compressors.kernels.residuals import add_and_top_k
from compressors.kernels.selection import largest_magnitude, magnitude_range, top_k
from compressors.layer import Layer, Step
from compressors.topk import ShareSparsifier, num_kept

TOP_ROUNDOFF = 1e-6
"""the largest magnitude is the last of eight products; how far it may be off, relatively"""


@dataclasses.dataclass(kw_only=True)
class QSparse(ShareSparsifier):
    """The entries that `topk` sends, at four bits a value: half the bytes at one percent.

    What rounding loses waits in the residual. Sums of such values are none, so it rides on `allgather`, which adds
    nothing on the way; through `ring` they grow to fp32.

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
        if largest_magnitude(values) == math.inf:  # what is not finite is among the largest
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
        """1 - 1 / m, for the largest entry arrives as it is; the others lose at most what they are."""
        return 1 - (1 - TOP_ROUNDOFF**2) / layer.numel

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return SparseLevels.packed_nbytes(layer.numel, num_kept(self.ratio, layer.numel))
