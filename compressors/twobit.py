"""Two bits: every element as -t, 0 or +t for a fixed threshold t; what is left waits.

Source: Apache MXNet's two-bit gradient compression (src/kvstore/gradient_compression-inl.h,
docs/faq/gradient_compression.md).
Differs: the threshold travels with the message; ends of layers are padded to a byte, not to four; the default threshold
is MXNet's 0.5 over a batch of 32, for there gradients are sums over the batch, and here they are means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from typing_extensions import Doc, override

from collectives.payloads.base import Payload
from collectives.payloads.codes import Codes
from collectives.ranges import Positive
from compressors.base import LossyCompressor
from compressors.kernels.ternary import CODES, ternary, ternary_of_sum, ternary_payload
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class TwoBit(LossyCompressor):
    """+t where x >= t, -t where x <= -t, else nothing.

    The threshold is in units of the gradient and must fit it: far above, nothing is sent for many steps; far below, an
        element moves by t a
    step at most and the residual grows. `hylo` finds it by itself.

    Bytes: 28 + ceil(m / 4) per layer of m elements.
    """

    sends: ClassVar[type[Payload]] = Codes

    threshold: Annotated[Positive, Doc("t, in units of the gradient")] = 0.015625
    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True

    @override
    def warnings(self) -> list[str]:
        sentences = super().warnings()
        if not self.error_feedback:
            sentences.append("twobit without error feedback loses what is below its threshold; set error_feedback=true")
        return sentences

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Codes:
        threshold = x.new_tensor([self.threshold])
        return ternary_payload(ternary(x, float(threshold), CODES), x.numel(), threshold)

    @override
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Codes:
        (gradient,) = gradients
        threshold = residual.new_tensor([self.threshold])
        return ternary_payload(ternary_of_sum(gradient, residual, float(threshold), left), layer.numel, threshold)

    def contraction_bound(self, layer: Layer) -> float:
        """1: an element that is sent moves by t <= |x| towards 0, and of a layer below t nothing is sent."""
        return 1.0

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Codes.packed_nbytes(layer.numel, 2)
