"""Threshold: every entry of at least a given magnitude.

Source: Strom 2015 (Interspeech), with a residual; Dutta et al. 2020 (arXiv:1911.08250) for the layer-wise use.
Differs: values are sent as they are, not as plus and minus the threshold; the threshold may be relative to the layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from typing_extensions import Doc, override

from collectives.payloads.base import Payload
from collectives.payloads.sparse import Sparse
from collectives.ranges import Positive
from compressors.families.sparsifier import TypedSparsifier
from compressors.kernels.residuals import add_and_find, add_and_measure
from compressors.kernels.selection import largest_magnitude, reaching, root_mean_square
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class Threshold(TypedSparsifier):
    """Entries with |x| >= threshold, in units of the gradient or of the layer's largest or root mean square magnitude.

    With error feedback and values in fp32 no residual exceeds an absolute threshold; 16 bits add their rounding. A
    relative one lets the largest entry through at every step.

    Bytes: 16 + min over index codings (z v + indices) per layer for z such entries of v bytes; at most 16 + m v.
    """

    sends: ClassVar[type[Payload]] = Sparse

    threshold: Annotated[Positive, Doc("smallest magnitude that is sent")] = 0.5
    unit: Annotated[
        Literal["absolute", "max", "rms"], Doc("what the threshold is a multiple of: 1, max|x|, rms(x)")
    ] = "max"

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        if self.unit == "absolute":
            level = self.threshold
        else:
            largest = largest_magnitude(x)
            level = self._level(largest if self.unit == "max" else root_mean_square(x), largest)
        return self._sparse(x, reaching(x, level), step)

    @override
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload | None:
        (gradient,) = gradients
        if self.unit == "rms":
            return None
        if self.unit == "max":
            _, largest = add_and_measure(gradient, residual, left)
            payload = self._sparse(left, reaching(left, self._level(largest, largest)), step)
        else:
            found = add_and_find(gradient, residual, self.threshold, left)
            payload = self._sparse_values(layer.numel, found.positions, found.values, step)
        payload.subtract_from_(left)
        return payload

    def contraction_bound(self, layer: Layer) -> float:
        """1 - 1 / m, for a relative threshold always lets the largest entry through; 1 for an absolute one."""
        return self._bound_for(0.0 if self.unit == "absolute" else 1 / layer.numel)

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return None

    def _level(self, unit: float, largest: float) -> float:
        """The magnitude to reach; a relative one is at most the largest, or a flat gradient would never be sent."""
        return min(self.threshold * unit, largest)
