"""Sign: one bit per element, and one scale per layer; or a vote of all ranks.

Source: scaled signs with error feedback: Karimireddy et al. 2019 (arXiv:1901.09847), algorithm 1; majority vote:
Bernstein et al. 2018 (arXiv:1802.05880, arXiv:1802.04434).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from typing_extensions import Doc, override

from collectives.options import OptionError
from collectives.payloads.base import Payload
from collectives.payloads.codes import Codes
from compressors.base import LossyCompressor
from compressors.kernels.quantisation import add_signs_and_magnitude, signs_and_magnitude
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class Sign(LossyCompressor):
    """mode=scaled sends mean|x| * sign(x); mode=vote sends sign(x), and the update is the sign of the sum.

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
