"""The narrow residual networks for 32x32 images: 6n + 2 layers in three stages of 16, 32 and 64 channels.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2; shortcut option A of
section 3.3; initialisation of He et al., "Delving Deep into Rectifiers" (2015).
Differs: where the resolution halves, the shortcut takes every second pixel and adds channels of zeros, half of them
before and half after the existing channels. The paper does not say where they are added; this has no effect on the
number of parameters.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, cast

import torch
from torch import nn
from torch.nn import functional
from torchvision.models import ResNet, resnet18, resnet34, resnet50
from typing_extensions import Doc, override

from bench.models.base import Model


@dataclasses.dataclass(kw_only=True)
class CifarResNet(Model):
    """Base of the components `resnet20`, `resnet32` and `resnet56`, residual networks for 32x32 images.

    Attributes:
        blocks_per_stage: number n of residual blocks in each of the three stages; the network has 6n + 2 layers with
            weights.
    """

    blocks_per_stage: ClassVar[int]

    @override
    def build(self, num_classes: int) -> nn.Module:
        n = self.blocks_per_stage
        network = nn.Sequential(
            _conv3x3(3, 16),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            _stage(16, 16, n, stride=1),  # at resolutions 32, 16 and 8
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
    """Residual block of two 3x3 convolutions and a shortcut without parameters."""

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
        """Return the input, subsampled by the stride and with channels of zeros added to match the block's output."""
        # `pad` takes its pairs from the last dimension on: width, height, channels.
        padding = (0, 0, 0, 0, self.pad_channels, self.pad_channels)
        return functional.pad(x[:, :, :: self.stride, :: self.stride], padding)


def _stage(in_channels: int, out_channels: int, num_blocks: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(in_channels, out_channels, stride),
        *(BasicBlock(out_channels, out_channels, 1) for _ in range(num_blocks - 1)),
    )


def _conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


@dataclasses.dataclass(kw_only=True)
class ResNet20(CifarResNet, name="resnet20"):
    """ResNet-20 for 32x32 images: 0.27 million parameters.

    Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2.

    Three stages of 3 basic blocks with 16, 32 and 64 channels; option-A shortcuts.
    """

    blocks_per_stage: ClassVar[int] = 3


@dataclasses.dataclass(kw_only=True)
class ResNet32(CifarResNet, name="resnet32"):
    """ResNet-32 for 32x32 images: 0.46 million parameters.

    Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2.

    Three stages of 5 basic blocks with 16, 32 and 64 channels; option-A shortcuts.
    """

    blocks_per_stage: ClassVar[int] = 5


@dataclasses.dataclass(kw_only=True)
class ResNet56(CifarResNet, name="resnet56"):
    """ResNet-56 for 32x32 images: 0.85 million parameters.

    Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2.

    Three stages of 9 basic blocks with 16, 32 and 64 channels; option-A shortcuts.
    """

    blocks_per_stage: ClassVar[int] = 9


@dataclasses.dataclass(kw_only=True)
class TorchvisionResNet(Model):
    """Base of the components `resnet18`, `resnet34` and `resnet50`, torchvision's residual networks.

    They have four stages (for 32x32 images: resolutions 32, 16, 8 and 4), average pooling and one linear layer.

    Attributes:
        network: torchvision's function that builds the network.
    """

    network: ClassVar[Callable[..., ResNet]]

    stem: Annotated[
        Literal["small", "imagenet"],
        Doc("small: a 3x3 convolution, for 32x32 images; imagenet: torchvision's 7x7 and max pooling, for 224x224"),
    ] = "small"

    @override
    def build(self, num_classes: int) -> nn.Module:
        if self.stem == "imagenet":
            return cast(nn.Module, type(self).network(num_classes=num_classes))
        stem = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        # torchvision initialises all its convolutions like this
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
        network = type(self).network(num_classes=num_classes)
        network.conv1 = stem
        network.maxpool = nn.Identity()
        return cast(nn.Module, network)


@dataclasses.dataclass(kw_only=True)
class ResNet18(TorchvisionResNet, name="resnet18"):
    """ResNet-18 for 32x32 images, or larger ones with stem=imagenet: 11.2 million parameters.

    Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), table 1.

    Stages of 2, 2, 2 and 2 basic blocks with 64, 128, 256 and 512 channels.
    """

    network: ClassVar[Callable[..., ResNet]] = staticmethod(resnet18)


@dataclasses.dataclass(kw_only=True)
class ResNet34(TorchvisionResNet, name="resnet34"):
    """ResNet-34 for 32x32 images, or larger ones with stem=imagenet: 21.3 million parameters.

    Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), table 1.

    Stages of 3, 4, 6 and 3 basic blocks with 64, 128, 256 and 512 channels.
    """

    network: ClassVar[Callable[..., ResNet]] = staticmethod(resnet34)


@dataclasses.dataclass(kw_only=True)
class ResNet50(TorchvisionResNet, name="resnet50"):
    """ResNet-50 for 32x32 images, or larger ones with stem=imagenet: 23.5 million parameters.

    Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), table 1.

    Stages of 3, 4, 6 and 3 bottleneck blocks with 64, 128, 256 and 512 channels.
    """

    network: ClassVar[Callable[..., ResNet]] = staticmethod(resnet50)
