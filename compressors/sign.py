"""Sign: one bit per element, and one scale per layer; or a vote of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from typing_extensions import Doc, override

from collectives.options import OptionError, Positive
from collectives.payloads.base import Payload
from collectives.payloads.codes import Codes, TwoMeans
from compressors.base import LossyCompressor
from compressors.kernels.quantisation import (
    add_signs_and_magnitude,
    add_signs_and_sums,
    signs_and_magnitude,
    signs_and_sums,
)
from compressors.kernels.ternary import CODES, ternary, ternary_of_sum, ternary_payload
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class Sign(LossyCompressor):
    """Sign: one bit per element, and one scale per layer; or a vote of all ranks.

    Source: scaled signs with error feedback: Karimireddy et al. 2019 (arXiv:1901.09847), algorithm 1; majority vote:
    Bernstein et al. 2018 (arXiv:1802.05880, arXiv:1802.04434).

    mode=scaled sends mean|x| * sign(x); mode=vote sends sign(x), and the update is the sign of the sum.

    One bit cannot say 0: a zero is sent as plus, and error feedback takes that back. A vote needs a learning rate of
        its own, some
    hundredths of the usual one; error feedback is refused with it, for an unscaled sign is no contraction and the
    residual diverges.

    Bytes: 28 + ceil(m / 8) per layer of m elements; 24 for zeros, where scaled.

    Raises:
        OptionError: "sign: mode=vote needs error_feedback=false, for the residual of an unscaled sign diverges".
    """

    sends: ClassVar[type[Payload]] = Codes

    mode: Annotated[Literal["scaled", "vote"], Doc("scaled by the mean magnitude, or a majority vote")] = "scaled"
    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "vote" and self.error_feedback:
            raise OptionError(
                "sign: mode=vote needs error_feedback=false, for the residual of an unscaled sign diverges"
            )

    @property
    @override
    def feedback_stays_bounded(self) -> bool:
        """What a vote loses is no part of a gradient: old votes would outweigh new ones."""
        return self.mode != "vote" and super().feedback_stays_bounded

    @override
    def warnings(self) -> list[str]:
        sentences = super().warnings()
        if self.mode == "vote":
            sentences.append("sign: with mode=vote every element moves by the learning rate, so use a far smaller one")
        elif not self.error_feedback:
            sentences.append("sign without error feedback is biased and may not converge; error_feedback=true is safe")
        return sentences

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Codes:
        packed = Codes.room(x.numel(), 1, x.device)
        return self._signs(packed, signs_and_magnitude(x, packed), layer)

    @override
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload:
        (gradient,) = gradients
        packed = Codes.room(layer.numel, 1, left.device)
        payload = self._signs(packed, add_signs_and_magnitude(gradient, residual, packed, left), layer)
        payload.subtract_from_(left)
        return payload

    def _signs(self, packed: torch.Tensor, magnitude: float, layer: Layer) -> Codes:
        scale = magnitude / layer.numel if self.mode == "scaled" else 1.0
        return Codes(layer.numel, "sign", 1, packed, torch.tensor([scale], dtype=torch.float32, device=packed.device))

    def finish(self, total: Payload, layer: Layer, step: Step, out: torch.Tensor) -> None:
        """The mean; or the sign of the sum, 0 where the vote is even."""
        super().finish(total, layer, step, out)
        if self.mode == "vote":
            out.sign_()

    def contraction_bound(self, layer: Layer) -> float | None:
        """1 - 1 / m where scaled, the least that 1 - |x|_1^2 / (m |x|^2) leaves; a vote has no bound for small x."""
        return 1 - 1 / layer.numel if self.mode == "scaled" else None

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Codes.packed_nbytes(layer.numel, 1)


@dataclasses.dataclass(kw_only=True)
class OneBit(LossyCompressor, name="onebit"):
    """One bit: every element as one of two values, the mean of the layer's positive and of its negative elements.

    Source: Seide et al. 2014 (Interspeech), "1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs", section 2.
    Differs: two means per layer, not per column of the weight, whose scales would outweigh the bits of small layers.

    The two means have the least squared error of any two values for this split; zeros count as positive.

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


@dataclasses.dataclass(kw_only=True)
class TwoBit(LossyCompressor, name="twobit"):
    """Two bits: every element as -t, 0 or +t for a fixed threshold t; what is left waits.

    Source: Apache MXNet's two-bit gradient compression (src/kvstore/gradient_compression-inl.h,
    docs/faq/gradient_compression.md).
    Differs: the threshold travels with the message; ends of layers are padded to a byte, not to four; the default threshold
    is MXNet's 0.5 over a batch of 32, for there gradients are sums over the batch, and here they are means.

    +t where x >= t, -t where x <= -t, else nothing.

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
