"""Torchvision's residual networks, with a stem for 32x32 images or with the original one.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), table 1; the networks are
torchvision's.
Differs: with stem=small the first convolution is 3x3 with stride 1 instead of 7x7 with stride 2, and the max pooling
after it is left out, as usual for small images: with the original stem the last stage would have 1x1 maps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from torch import nn
from torchvision.models import ResNet
from typing_extensions import Doc

from bench.models.base import Model


@dataclasses.dataclass(kw_only=True)
class TorchvisionResNet(Model):
    """Base of the components `resnet18`, `resnet34` and `resnet50`.

    Class facts:
        network: torchvision's function that builds the network.
    """

    network: ClassVar[Callable[..., ResNet]]

    stem: Annotated[
        Literal["small", "imagenet"],
        Doc("small: a 3x3 convolution, for 32x32 images; imagenet: torchvision's 7x7 and max pooling, for 224x224"),
    ] = "small"

    def build(self, num_classes: int) -> nn.Module:
        """Build four stages (for 32x32 images: resolutions 32, 16, 8 and 4), average pooling and one linear layer."""
        network: nn.Module
        if self.stem == "imagenet":
            network = type(self).network(num_classes=num_classes)
            return network
        stem = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        # torchvision initialises all its convolutions like this
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
        network = type(self).network(num_classes=num_classes)
        network.conv1 = stem
        network.maxpool = nn.Identity()
        return network
