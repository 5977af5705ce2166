"""The narrow residual networks for 32x32 images: 6n + 2 layers in three stages of 16, 32 and 64 channels.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2; shortcut option A of
section 3.3; initialisation of He et al., "Delving Deep into Rectifiers" (2015).
Differs: where the resolution halves, the shortcut takes every second pixel and pads channels of zeros, half of them
before and half after the old ones. The paper does not say on which side; the number of parameters is the same.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from bench.models.base import Model


@dataclasses.dataclass(kw_only=True)
class CifarResNet(Model):
    """Base of the components `resnet20`, `resnet32` and `resnet56`.

    Class facts:
        blocks_per_stage: n; the network has 6n + 2 layers with weights.
    """

    blocks_per_stage: ClassVar[int]

    def build(self, num_classes: int) -> nn.Module:
        """Build a 3x3 stem, three stages of n blocks at resolutions 32, 16 and 8, average pooling, one linear layer."""
        n = self.blocks_per_stage
        network = nn.Sequential(
            _conv3x3(3, 16),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            _stage(16, 16, n, stride=1),
            _stage(16, 32, n, stride=2),
            _stage(32, 64, n, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, num_classes),
        )
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        return network


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, out_channels, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv3x3(out_channels, out_channels)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride = stride
        self.pad_channels = (out_channels - in_channels) // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, in_channels, h, w] to [n, out_channels, h / stride, w / stride]."""
        residual = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(residual + self.shortcut(x))

    def shortcut(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input, subsampled and zero-padded in channels if the shape changes (option A)."""
        subsampled = x[:, :, :: self.stride, :: self.stride]
        # `pad` takes its pairs from the last dimension on: width, height, channels.
        return functional.pad(subsampled, (0, 0, 0, 0, self.pad_channels, self.pad_channels))


def _stage(in_channels: int, out_channels: int, num_blocks: int, *, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, out_channels, stride)
    return nn.Sequential(first, *(BasicBlock(out_channels, out_channels, 1) for _ in range(num_blocks - 1)))


def _conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
