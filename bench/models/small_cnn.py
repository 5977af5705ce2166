"""Small CNN: a convolutional network that trains in seconds on one CPU core.

It has four 3x3 convolutions, each followed by batch normalisation and ReLU, and two fully connected layers. Every
convolution after the first halves the resolution by its stride, so most arithmetic is done on small maps. With the
default options, a convolution (36 864 weights) and a fully connected layer (131 072) are large enough for every
compressor to have an effect.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from annotated_types import Ge, Le
from torch import nn
from typing_extensions import Doc

from bench.models.base import Model


@dataclasses.dataclass(kw_only=True)
class SmallCnn(Model):
    """Build a network of 193 178 parameters for ten classes, with 3.5 million multiplications per image."""

    width: Annotated[
        int, Ge(1), Le(4096), Doc("channels of the first convolution; the last two have four times as many")
    ] = 16
    hidden: Annotated[int, Ge(1), Le(65536), Doc("units of the fully connected layer before the output")] = 128

    def build(self, num_classes: int) -> nn.Module:
        """Build the network: resolutions 32, 16, 8 and 4; torch's default initialisation."""
        width = self.width
        return nn.Sequential(
            *_conv_bn_relu(3, width, stride=1),
            *_conv_bn_relu(width, 2 * width, stride=2),
            *_conv_bn_relu(2 * width, 4 * width, stride=2),
            *_conv_bn_relu(4 * width, 4 * width, stride=2),
            nn.Flatten(),
            nn.Linear(4 * width * 4 * 4, self.hidden),
            nn.ReLU(inplace=True),
            nn.Linear(self.hidden, num_classes),
        )


def _conv_bn_relu(in_channels: int, out_channels: int, *, stride: int) -> tuple[nn.Module, ...]:
    # The normalisation subtracts the mean, so a bias of the convolution would have no effect.
    return (
        nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
