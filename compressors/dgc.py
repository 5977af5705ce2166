"""Deep gradient compression: top-k by a sampled threshold, with momentum correction, masking, clipping and warm-up.

Source: Lin et al. 2018 (arXiv:1712.01887), sections 3.1 to 3.3; sampling and its corrections as in the authors' code
(synxlin/deep-gradient-compression, dgc/compression.py).
Differs: where the threshold lets too many through, the largest are sent, not the first; clipping is per layer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le
from typing_extensions import Doc, override

from collectives.payloads.base import Payload
from collectives.payloads.sparse import Sparse
from collectives.ranges import PositiveOrZero
from compressors.families.sparsifier import DensitySparsifier, num_kept
from compressors.kernels.random import seed_for
from compressors.kernels.selection import kth_largest, reaching, top_k
from compressors.layer import Layer, Step

LOWER_BOUND = 0.8  # of the wanted number of entries; below it the threshold is lowered by the same factor
MAX_ROUNDS = 10
MIN_SAMPLED = 10  # entries above the threshold that a sample should hold


@dataclasses.dataclass(kw_only=True)
class Dgc(DensitySparsifier):
    """At most k = ratio * m entries per layer of m elements, those above a threshold estimated from a sample.

    Momentum correction is on: the optimizer's momentum moves here, so the optimizer must be one with a single momentum
        coefficient.

    Bytes: 16 + min over index codings (z v + indices) per layer for z <= k entries of v bytes; at most 16 + m v.
    """

    sends: ClassVar[type[Payload]] = Sparse

    ratio: Annotated[float, Gt(0), Le(1), Doc("kept entries / entries, at most")] = 0.001
    momentum_correction: Annotated[
        bool,
        Doc("apply the optimizer's momentum before selection, cleared where sent (the optimizer's own is then off)"),
    ] = True
    sample_ratio: Annotated[float, Gt(0), Le(1), Doc("share of a layer that the threshold is estimated from")] = 0.01
    clip_norm: Annotated[
        PositiveOrZero, Doc("clip each layer's own gradient to this L2 norm / sqrt(world_size); 0: do not")
    ] = 0.0

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        indices = self._select(x, num_kept(self.density(step), x.numel()), layer, step)
        return self._sparse(x, indices, step)

    @override
    def clip_limit(self, step: Step) -> float | None:
        return self.clip_norm / math.sqrt(step.world_size) if self.clip_norm else None

    def contraction_bound(self, layer: Layer) -> float:
        """1 - 1 / m, for the largest entry is always sent; how many more are, a sample decides."""
        return self._bound_for(1 / layer.numel)

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return None

    def _select(self, x: torch.Tensor, k: int, layer: Layer, step: Step) -> torch.Tensor:
        """Positions of at most k entries, ascending: all above a threshold, or the largest k where those are more.

        They are the largest k as well where a sample would hold too few large ones.
        """
        stride = int(1 / self.sample_ratio)
        if k == x.numel():
            return torch.arange(k, device=x.device)
        if k < MIN_SAMPLED * stride:
            return top_k(x, k)
        start = seed_for(layer, step, per_rank=True) % stride
        sample = x[start::stride].contiguous()
        threshold = kth_largest(sample, max(1, math.ceil(sample.numel() * k / x.numel())))
        candidates = reaching(x, threshold)
        for _ in range(MAX_ROUNDS):
            if len(candidates) >= LOWER_BOUND * k:
                break
            threshold *= LOWER_BOUND
            candidates = reaching(x, threshold)
        if len(candidates) > k:
            candidates = candidates[top_k(x.index_select(0, candidates), k)]
        return candidates
