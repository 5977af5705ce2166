"""CIFAR-100: 60 000 photographs of 32x32 pixels in 100 classes, downloaded by `bench data prepare cifar100`.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), section 3; the fine labels.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torchvision.datasets import CIFAR10, CIFAR100

from bench.datasets._cifar import Cifar


@dataclasses.dataclass(kw_only=True)
class Cifar100(Cifar):
    """Load CIFAR-100: 50 000 training and 10 000 test images, normalised by statistics of the training part."""

    num_classes: ClassVar[int] = 100
    mean: ClassVar[tuple[float, float, float]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, float, float]] = (0.2673, 0.2564, 0.2762)
    archive: ClassVar[type[CIFAR10]] = CIFAR100
