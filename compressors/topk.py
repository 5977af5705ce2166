"""Top-k: the largest entries of every layer.

Source: Aji, Heafield 2017 (arXiv:1704.05021); error feedback: Stich, Cordonnier, Jaggi 2018 (arXiv:1809.07599).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from typing_extensions import override

from collectives.payloads.base import Payload
from collectives.payloads.sparse import Sparse
from compressors.families.sparsifier import DensitySparsifier, num_kept
from compressors.kernels.selection import top_k
from compressors.kernels.value_types import TORCH_DTYPES
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class TopK(DensitySparsifier):
    """k = ratio * m entries of largest magnitude per layer of m elements, rounded half up, at least 1.

    Of equal magnitudes the first is kept. What is zero, or rounds to it, is left out.

    Bytes: 16 + min over index codings (k v + indices) per layer, v bytes per value; at most 16 + m v. Coordinates take
        k i bytes with i = 1
    up to 256 elements, 2 up to 65536, else 4; a bitmap takes m / 8.
    """

    sends: ClassVar[type[Payload]] = Sparse
    notices_nonfinite: ClassVar[bool] = True

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        indices = top_k(x, num_kept(self.density(step), x.numel()))
        return self._sparse(x, indices, step)

    @override
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload:
        return self._largest_of_sum(gradients, residual, left, num_kept(self.density(step), layer.numel), step)

    def contraction_bound(self, layer: Layer) -> float:
        """1 - k / m: the k largest of m hold at least that share of the squares."""
        return self._bound_for(num_kept(self.ratio, layer.numel) / layer.numel)

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        k = num_kept(self.ratio, layer.numel)
        return Sparse.packed_nbytes(layer.numel, k, TORCH_DTYPES[self.value_dtype])
