"""CIFAR-10: 60 000 photographs of 32x32 pixels in ten classes, downloaded once by `bench data prepare cifar10`.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), section 3.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torchvision.datasets import CIFAR10

from bench.datasets._cifar import Cifar


@dataclasses.dataclass(kw_only=True)
class Cifar10(Cifar):
    """Load CIFAR-10: 50 000 training and 10 000 test images, normalised by statistics of the training part."""

    num_classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, float, float]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, float, float]] = (0.2470, 0.2435, 0.2616)
    archive: ClassVar[type[CIFAR10]] = CIFAR10
