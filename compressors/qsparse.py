"""Quantised top-k: the largest entries of every layer, each as a sign and one of eight magnitudes.

Source: Basu et al. 2019 (Qsparse-local-SGD, arXiv:1906.02367): top-k and quantisation composed, with error feedback.
Differs: magnitudes are a geometric row from the smallest kept to the largest, and an entry goes to the nearest of them;
a step of its own is sent, not the sum of several (that is strategy `local`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from typing_extensions import override

from collectives.payloads.base import Payload
from collectives.payloads.sparse_levels import LARGEST, NEGATIVE, NUM_LEVELS, SparseLevels, levels
from compressors.families.sparsifier import ShareSparsifier, num_kept
from compressors.kernels.magnitudes import magnitudes
from compressors.kernels.selection import top_k
from compressors.layer import Layer, Step

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
        return self._largest_of_sum(gradients, residual, left, num_kept(self.density(step), layer.numel), step)

    @override
    def _sparse_values(self, numel: int, indices: torch.Tensor, values: torch.Tensor, step: Step) -> SparseLevels:
        if not values.all():
            indices, values = indices[values != 0], values[values != 0]
        if not values.numel():
            return SparseLevels(numel, indices, 0.0, 0.0, values.to(torch.uint8))
        sizes = magnitudes(values).clamp_(max=LARGEST)
        low, high = map(float, sizes.aminmax())
        ratio = max(1.0, float(torch.tensor((high / low) ** (1 / (NUM_LEVELS - 1)))))
        row = torch.tensor(levels(low, ratio), dtype=torch.float64)
        middles = ((row[1:] + row[:-1]) / 2).float().to(sizes.device)
        codes = torch.bucketize(sizes, middles, right=True) + NEGATIVE * (values < 0)
        return SparseLevels(numel, indices, low, ratio, codes.to(torch.uint8))

    def contraction_bound(self, layer: Layer) -> float:
        """1 - 1 / m, for the largest entry arrives as it is; the others lose at most what they are."""
        return 1 - (1 - TOP_ROUNDOFF**2) / layer.numel

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return SparseLevels.packed_nbytes(layer.numel, num_kept(self.ratio, layer.numel))
