"""Small CNN: a convolutional network that trains in seconds on one CPU core."""

import dataclasses
from typing import Annotated

from annotated_types import Ge, Le
from torch import nn
from typing_extensions import Doc, override

from bench.models.base import Model


@dataclasses.dataclass(kw_only=True)
class SmallCnn(Model, name="small_cnn"):
    """Small CNN: a convolutional network that trains in seconds on one CPU core.

    It has four 3x3 convolutions, each followed by batch normalisation and ReLU, and two fully connected layers. Every
    convolution after the first halves the resolution by its stride, so most arithmetic is done on small feature maps.
    With the default options, a convolution (36 864 weights) and a fully connected layer (131 072) are large enough for
    every compressor to have an effect.

    Builds a network of 193 178 parameters for ten classes, with 3.5 million multiplications per image.
    """

    width: Annotated[
        int, Ge(1), Le(4096), Doc("channels of the first convolution; the last two have four times as many")
    ] = 16
    hidden: Annotated[int, Ge(1), Le(65536), Doc("units of the fully connected layer before the output")] = 128

    @override
    def build(self, num_classes: int) -> nn.Module:
        width = self.width
        return nn.Sequential(  # resolutions 32, 16, 8 and 4
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


# Channels of each convolution, as multiples of the first one's; the resolution halves after every group.
_CHANNELS = ((1,), (2,), (4, 4), (8, 8), (8, 8))


@dataclasses.dataclass(kw_only=True)
class Vgg11(Model, name="vgg11"):
    """VGG-11 for 32x32 images: 28 million parameters, most of them in two fully connected layers.

    Source: Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (2015), table 1,
    configuration A: eight convolutions, the resolution halved five times, fully connected layers with 4096, 4096 and
    `num_classes` outputs.
    Differs: with 32x32 images the first fully connected layer gets one pixel of 512 channels (7x7 pixels in the paper,
    which would make the network several times larger); batch normalisation after each convolution, as in torchvision's
    `vgg11_bn`, so that it trains without initial weights from a shallower network; no dropout.

    Builds a network of 28 146 762 parameters for ten classes, two thirds of them in fully connected layers.

    The options width=16,hidden=1024 divide every dimension by four: 1.8 million parameters in the same proportions.
    """

    width: Annotated[
        int, Ge(1), Le(4096), Doc("channels of the first convolution; the last four have eight times as many")
    ] = 64
    hidden: Annotated[int, Ge(1), Le(65536), Doc("units of the two fully connected layers before the output")] = 4096

    @override
    def build(self, num_classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        channels = 3
        for group in _CHANNELS:
            for factor in group:
                layers += _conv_bn_relu(channels, factor * self.width, stride=1)
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
        for module in network.modules():  # He's initialisation, which keeps the scale of activations
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        return network


@dataclasses.dataclass(kw_only=True)
class Linear(Model, name="linear"):
    """Softmax regression on raw pixels: one matrix and a bias.

    Builds the simplest model, a baseline for all other models, with 30 730 parameters for ten classes.
    """

    @override
    def build(self, num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))
