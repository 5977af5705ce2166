"""Methods that send the sign of every element, in one or two bits: `sign`, `onebit` and `twobit`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from typing_extensions import Doc, override

from collectives.options import OptionError, Positive
from collectives.payloads import Codes, Payload, TwoMeans
from collectives.payloads.codec.bits import packed_nbytes
from compressors.base import ErrorFeedback, LossyCompressor, Traits
from compressors.kernels import batches
from compressors.kernels.quantisation import (
    CODES,
    signs_and_magnitude,
    signs_and_sums,
    ternary,
    ternary_of_sum,
)
from compressors.layer import Layer, Step
from compressors.parts.buckets import NonFinite, each_layer, is_finite


@dataclasses.dataclass(kw_only=True)
class Sign(LossyCompressor, name="sign"):
    """Sign: sends one bit per element and one scale per layer, or takes a majority vote of the signs.

    Source: scaled signs with error feedback: Karimireddy et al. 2019 (arXiv:1901.09847), algorithm 1; majority vote:
    Bernstein et al. 2018 (arXiv:1802.05880, arXiv:1802.04434).

    mode=scaled sends mean|x| * sign(x). mode=vote sends sign(x), and the update is the sign of the sum.

    One bit cannot encode 0, so zeros are sent as plus; error feedback corrects this. A vote needs a learning rate of a
    few hundredths of the usual one. A vote excludes error feedback, because an unscaled sign is no contraction, so the
    residual would diverge.

    Bytes: 28 + ceil(m / 8) per layer of m elements; 24 for a layer of zeros with mode=scaled.

    Raises:
        OptionError: mode=vote with error_feedback=true.
    """

    sends: ClassVar[type[Payload]] = Codes
    averages: ClassVar[bool] = False  # because a vote does not

    mode: Annotated[Literal["scaled", "vote"], Doc("scaled by the mean magnitude, or a majority vote")] = "scaled"
    error_feedback: ErrorFeedback = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "vote" and self.error_feedback:
            raise OptionError(
                "sign: mode=vote needs error_feedback=false, because the residual of an unscaled sign diverges"
            )

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        # The error of a vote does not have the scale of the gradient, so it would outweigh new votes.
        return dataclasses.replace(super().traits, feedback_diverges=self.mode == "vote")

    @override
    def warnings(self) -> list[str]:
        if self.mode == "vote":
            return ["sign: mode=vote moves every element by the learning rate, so use a far smaller learning rate"]
        note = "sign without error feedback is biased and may not converge; error_feedback=true is safe"
        return [] if self.error_feedback else [note]

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Codes:
        packed = Codes.room_for_codes(x.numel(), 1, x.device)
        magnitude = signs_and_magnitude(x, packed)
        scale = magnitude / layer.numel if self.mode == "scaled" else 1.0
        return Codes(layer.numel, "sign", 1, packed, torch.tensor([scale], dtype=torch.float32, device=packed.device))

    @override
    def encode_bucket(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool = False,
    ) -> Payload:
        if left is None or not batches.serves(left):
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)
        numels = [layer.numel for layer in layers]
        payload = batches.sign_layers(gradients, residual, left, numels, by_mean=self.mode == "scaled")
        if screen and not is_finite(left):
            raise NonFinite
        return payload

    @override
    def finish(self, total: Payload, layer: Layer, step: Step, updates: Sequence[torch.Tensor]) -> None:
        super().finish(total, layer, step, updates)
        if self.mode == "vote":
            for update in updates:
                update.sign_()  # 0 for an even vote

    @override
    def contraction_bound(self, layer: Layer) -> float | None:
        # With mode=scaled, 1 - 1 / m is the maximum of 1 - |x|_1^2 / (m |x|^2); a vote has no bound for small x.
        return 1 - 1 / layer.numel if self.mode == "scaled" else None

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Codes.packed_nbytes(layer.numel, 1)


@dataclasses.dataclass(kw_only=True)
class OneBit(LossyCompressor, name="onebit"):
    """One bit: sends every element as one of two means: that of the layer's positive or of its negative elements.

    Source: Seide et al. 2014 (Interspeech), "1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs", section 2.
    Differs: there are two means per layer, not per column of the weight, because the means of the columns would take
    more bytes than the bits in small layers.

    No other two values have a smaller squared error for this split by sign. Zeros count as positive.

    Bytes: 24 + ceil(m / 8) per layer of m elements; 24 for a layer of zeros.
    """

    sends: ClassVar[type[Payload]] = TwoMeans

    error_feedback: ErrorFeedback = True

    @override
    def warnings(self) -> list[str]:
        return (
            []
            if self.error_feedback
            else ["onebit without error feedback is biased and may not converge; error_feedback=true is safe"]
        )

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> TwoMeans:
        packed = TwoMeans.room(packed_nbytes(x.numel(), 1), torch.uint8, x.device)
        num_positive, above, below = signs_and_sums(x, packed)
        return TwoMeans(x.numel(), below / max(1, x.numel() - num_positive), above / max(1, num_positive), packed)

    @override
    def encode_bucket(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool = False,
    ) -> Payload:
        if left is None or not batches.serves(left):
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)
        payload = batches.two_means_of_layers(gradients, residual, left, [layer.numel for layer in layers])
        if screen and not is_finite(left):
            raise NonFinite
        return payload

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return 1 - 1 / layer.numel  # the bound for a single mean magnitude; two means are never worse

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return TwoMeans.packed_nbytes(layer.numel)


@dataclasses.dataclass(kw_only=True)
class TwoBit(LossyCompressor, name="twobit"):
    """Two bits: sends every element as -t, 0 or +t, for a fixed threshold t.

    Source: Apache MXNet's two-bit gradient compression (src/kvstore/gradient_compression-inl.h,
    docs/faq/gradient_compression.md).
    Differs: the message holds the threshold. Layers are padded to one byte, not to four. The default threshold is
    MXNet's 0.5 divided by a batch of 32, because gradients are means over the batch here, but sums in MXNet.

    An element x is sent as +t if x >= t, as -t if x <= -t, and otherwise as 0.

    The threshold has the unit of the gradient and must fit it. If the threshold is far too large, nothing is sent for
    many steps. If it is far too small, the residual grows, because an element moves by at most t per step. `hylo`
    adapts its threshold by itself.

    Bytes: 28 + ceil(m / 4) per layer of m elements.
    """

    sends: ClassVar[type[Payload]] = Codes

    threshold: Annotated[Positive, Doc("t, in units of the gradient")] = 0.015625
    error_feedback: ErrorFeedback = True

    @override
    def warnings(self) -> list[str]:
        return (
            []
            if self.error_feedback
            else ["twobit without error feedback loses what is below its threshold; set error_feedback=true"]
        )

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Codes:
        threshold = x.new_tensor([self.threshold])
        return Codes(x.numel(), "ternary", CODES, ternary(x, float(threshold), CODES), threshold)

    @override
    def encode_bucket(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool = False,
    ) -> Payload:
        if residual is None or left is None or not batches.serves(left):
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)

        def encode(gradient: torch.Tensor, residual: torch.Tensor, left: torch.Tensor, layer: Layer) -> Codes:
            threshold = residual.new_tensor([self.threshold])
            codes = ternary_of_sum(gradient, residual, float(threshold), left)
            return Codes(layer.numel, "ternary", CODES, codes, threshold)

        return each_layer(encode, gradients, residual, left, layers, screen=screen)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return 1.0  # an element that is sent moves by t <= |x| towards 0; if all elements are below t, nothing is sent

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Codes.packed_nbytes(layer.numel, 2)
