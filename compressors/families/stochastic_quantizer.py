"""Unbiased quantisers: what those share that round at random, so that the expectation of the payload is the gradient.

Error feedback needs a contraction, and an unbiased quantiser with E|Q(x) - x|^2 <= w |x|^2 is none; Q(x) / (1 + w) is
one, with d = 1 / (1 + w). So with error feedback the scales are divided by 1 + w.

Source: Karimireddy et al. 2019 (arXiv:1901.09847), remark 7; Horvath et al. 2019 (arXiv:1905.10988) for the scaling.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Annotated, ClassVar

from annotated_types import Ge, Le
from typing_extensions import Doc, override

from collectives.payloads.base import Payload
from collectives.payloads.codes import Codes
from compressors.base import Granularity, LossyCompressor
from compressors.layer import Layer


@dataclasses.dataclass(kw_only=True)
class StochasticQuantizer(LossyCompressor):
    """Codes of `bits` bits with one scale per block of a bucket."""

    sends: ClassVar[type[Payload]] = Codes
    biased: ClassVar[bool] = False
    granularity: ClassVar[Granularity] = "bucket"

    block_numel: Annotated[int, Ge(8), Le(1 << 20), Doc("elements per scale")] = 512

    @property
    @abc.abstractmethod
    def code_bits(self) -> int:
        """Width of a code."""

    @property
    @abc.abstractmethod
    def variance_bound(self) -> float:
        """The w in E|Q(x) - x|^2 <= w |x|^2."""

    @property
    def shrinkage(self) -> float:
        """What scales are multiplied by: 1, or 1 / (1 + w) with error feedback."""
        return 1 / (1 + self.variance_bound) if self.error_feedback else 1.0

    def contraction_bound(self, layer: Layer) -> float:
        """The w of an unbiased quantiser; with error feedback w / (1 + w). Both in expectation."""
        return self.variance_bound * self.shrinkage

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Codes.packed_nbytes(layer.numel, self.code_bits, block_numel=self.block_numel)
