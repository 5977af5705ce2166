"""VGG-11 for 32x32 images: 28 million parameters, most of them in two fully connected layers.

Source: Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (2015), table 1,
configuration A: eight convolutions, the resolution halved five times, fully connected layers with 4096, 4096 and
`num_classes` outputs.
Differs: with 32x32 images the first fully connected layer gets one pixel of 512 channels (7x7 pixels in the paper,
which would make the network several times larger); batch normalisation after each convolution, as in torchvision's
`vgg11_bn`, so that it trains without initial weights from a shallower network; no dropout.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from annotated_types import Ge, Le
from torch import nn
from typing_extensions import Doc

from bench.models.base import Model

# Channels of each convolution, as multiples of the first one's; the resolution halves after every group.
_CHANNELS = ((1,), (2,), (4, 4), (8, 8), (8, 8))


@dataclasses.dataclass(kw_only=True)
class Vgg11(Model):
    """Build a network of 28 146 762 parameters for ten classes, two thirds of them in fully connected layers.

    width=16,hidden=1024 divides every dimension by four: 1.8 million parameters in the same proportions.
    """

    width: Annotated[
        int, Ge(1), Le(4096), Doc("channels of the first convolution; the last four have eight times as many")
    ] = 64
    hidden: Annotated[int, Ge(1), Le(65536), Doc("units of the two fully connected layers before the output")] = 4096

    def build(self, num_classes: int) -> nn.Module:
        """Build the network: resolutions 32, 16, 8, 4, 2 and 1; He's initialisation, which keeps signals' size."""
        layers: list[nn.Module] = []
        channels = 3
        for group in _CHANNELS:
            for factor in group:
                layers += _conv_bn_relu(channels, factor * self.width)
                channels = factor * self.width
            layers.append(nn.MaxPool2d(2))
        network = nn.Sequential(
            *layers,
            nn.Flatten(),
            nn.Linear(channels, self.hidden),
            nn.ReLU(inplace=True),
            nn.Linear(self.hidden, self.hidden),
            nn.ReLU(inplace=True),
            nn.Linear(self.hidden, num_classes),
        )
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        return network


def _conv_bn_relu(in_channels: int, out_channels: int) -> tuple[nn.Module, ...]:
    # The normalisation subtracts the mean, so a bias of the convolution would have no effect.
    return (
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
