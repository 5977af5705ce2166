"""ResNet-32 for 32x32 images: 0.46 million parameters.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from bench.models._cifar_resnet import CifarResNet


@dataclasses.dataclass(kw_only=True)
class ResNet32(CifarResNet):
    """Three stages of 5 basic blocks with 16, 32 and 64 channels; option-A shortcuts."""

    blocks_per_stage: ClassVar[int] = 5
