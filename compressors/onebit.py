"""One bit: every element as one of two values, the mean of the layer's positive and of its negative elements.

Source: Seide et al. 2014 (Interspeech), "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", section 2.
Differs: two means per layer, not per column of the weight, whose scales would outweigh the bits of small layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from typing_extensions import Doc, override

from collectives.payloads.base import Payload
from collectives.payloads.codes import TwoMeans
from compressors.base import LossyCompressor
from compressors.kernels.quantisation import add_signs_and_sums, signs_and_sums
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class OneBit(LossyCompressor):
    """The two means have the least squared error of any two values for this split; zeros count as positive.

    Bytes: 24 + ceil(m / 8) per layer of m elements; 24 for zeros.
    """

    sends: ClassVar[type[Payload]] = TwoMeans

    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True

    @override
    def warnings(self) -> list[str]:
        sentences = super().warnings()
        if not self.error_feedback:
            sentences.append(
                "onebit without error feedback is biased and may not converge; error_feedback=true is safe"
            )
        return sentences

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> TwoMeans:
        packed = TwoMeans.room(x.numel(), x.device)
        return _two_means(x.numel(), packed, *signs_and_sums(x, packed))

    @override
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload:
        (gradient,) = gradients
        packed = TwoMeans.room(layer.numel, left.device)
        payload = _two_means(layer.numel, packed, *add_signs_and_sums(gradient, residual, packed, left))
        payload.subtract_from_(left)
        return payload

    def contraction_bound(self, layer: Layer) -> float:
        """1 - 1 / m, as one mean magnitude for both signs gives; two means are never worse."""
        return 1 - 1 / layer.numel

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return TwoMeans.packed_nbytes(layer.numel)


def _two_means(numel: int, packed: torch.Tensor, num_positive: int, above: float, below: float) -> TwoMeans:
    return TwoMeans(numel, below / max(1, numel - num_positive), above / max(1, num_positive), packed)
