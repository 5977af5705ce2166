"""ResNet-18 for 32x32 images, or larger ones with stem=imagenet: 11.2 million parameters.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), table 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from torchvision.models import ResNet, resnet18

from bench.models._torchvision_resnet import TorchvisionResNet


@dataclasses.dataclass(kw_only=True)
class ResNet18(TorchvisionResNet):
    """Stages of 2, 2, 2 and 2 basic blocks with 64, 128, 256 and 512 channels."""

    network: ClassVar[Callable[..., ResNet]] = staticmethod(resnet18)
