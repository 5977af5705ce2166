"""Generated images of textured shapes, CIFAR-shaped, in any number: what to train on where nothing can be downloaded.

A class is one of five shapes (disc, square, triangle, cross, ring) with one of two textures (stripes, checks).
Position, size, rotation, colours, the texture's phase and period, the background's blotches and noise are drawn anew
for every image and say nothing about the class. Since a shape may be brighter or darker than what surrounds it, no
single pixel helps: a linear model stays near chance, while a small convolutional network learns the task in a few
epochs.

Each rank generates the same images from the run's seed, with private generators. Image i of a part does not depend on
how many are asked for, so a smaller set is the beginning of a larger one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch.nn import functional
from typing_extensions import Doc

from bench.datasets.base import Dataset, DatasetError, Part
from collectives.ranges import Count

_SIZE = 32
_NUM_SHAPES = 5
_NUM_CLASSES = 2 * _NUM_SHAPES
_BLOCK = 500  # images per generator: small enough for a core's cache


@dataclasses.dataclass(kw_only=True)
class Synthetic(Dataset):
    """Ten balanced classes; every ten images in a row hold each class once."""

    num_classes: ClassVar[int] = _NUM_CLASSES
    mean: ClassVar[tuple[float, float, float]] = (0.5, 0.5, 0.5)
    std: ClassVar[tuple[float, float, float]] = (0.141, 0.141, 0.141)
    mirror: ClassVar[bool] = True

    train_size: Annotated[Count, Doc("training samples where the run does not say how many")] = 10_000
    test_size: Annotated[Count, Doc("test samples where the run does not say how many")] = 2_000
    noise: Annotated[float, Ge(0), Le(1), Doc("noise on every pixel, as a share of white; more makes it harder")] = 0.05

    def sizes(self) -> tuple[int, int]:
        """The sizes given as options; `load` makes more on request."""
        return self.train_size, self.test_size

    def _resolve_size(self, part: str, asked: int | None, whole: int) -> int:
        size = whole if asked is None else asked
        if size < 1:
            raise DatasetError(f"{self.component_name} makes at least one {part} sample, so {size} are not possible")
        return size

    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Part, Part]:
        """Both parts, generated from `seed` (about 0.1 ms per image and core); `data_dir` does not matter.

        Raises:
            DatasetError: a size below 1.
        """
        train_size, test_size = self.resolve_sizes(train_size, test_size)
        return self._generate("train", train_size, seed), self._generate("test", test_size, seed)

    def _generate(self, part: str, size: int, seed: int) -> Part:
        images = torch.empty(size, 3, _SIZE, _SIZE, dtype=torch.uint8)
        labels = torch.empty(size, dtype=torch.int64)
        for start in range(0, size, _BLOCK):
            generator = _generator(seed, part, start)
            block_labels = _shuffled_classes(generator)
            block_images = _draw(block_labels, self.noise, generator)
            labels[start : start + _BLOCK] = block_labels[: size - start]
            images[start : start + _BLOCK] = block_images[: size - start]
        return Part(images=images, labels=labels)


def _generator(seed: int, part: str, start: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{part}/{start}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _shuffled_classes(generator: torch.Generator) -> torch.Tensor:
    """Labels of one block, int64 [_BLOCK]: each class once in every ten, in random order."""
    return torch.rand(_BLOCK // _NUM_CLASSES, _NUM_CLASSES, generator=generator).argsort(dim=1).flatten()


def _draw(labels: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    """One image per label, int64 [n] -> uint8 [n, 3, 32, 32]."""
    n = len(labels)
    shape, texture = labels % _NUM_SHAPES, labels // _NUM_SHAPES
    x, y = _object_coordinates(n, generator)
    inside = _coverage(_distance(x, y, shape)).unsqueeze(1)
    weight = _texture(texture, generator).unsqueeze(1)
    bright, dark = _two_colours(n, generator)
    figure = dark + (bright - dark) * weight
    background = _blotches(n, generator)
    image = background + (figure - background) * inside
    image += noise * torch.randn(image.shape, generator=generator)
    return (image * 255).round_().clamp_(0, 255).to(torch.uint8)


def _uniform(n: int, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """[n, 1, 1], to be combined with maps [n, 32, 32]."""
    return torch.rand(n, 1, 1, generator=generator) * (high - low) + low


def _pixel_grid() -> tuple[torch.Tensor, torch.Tensor]:
    """(x, y) of the pixel centres, [1, 32] and [32, 1], from -1 to 1 across the image."""
    centre = (torch.arange(_SIZE) + 0.5) * (2 / _SIZE) - 1
    return centre.view(1, -1), centre.view(-1, 1)


def _rotated(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The pixel grid turned about the image's centre by up to 0.5 radians either way: two maps [n, 32, 32]."""
    angle = _uniform(n, -0.5, 0.5, generator)
    x, y = _pixel_grid()
    return x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()


def _object_coordinates(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixel positions seen from a shape that is moved, turned and scaled at random: two maps [n, 32, 32].

    The shape's radius is 1 in these units: 0.5 to 0.85 of half the image.
    """
    x, y = _rotated(n, generator)
    radius = _uniform(n, 0.5, 0.85, generator)
    return (x - _uniform(n, -0.25, 0.25, generator)) / radius, (y - _uniform(n, -0.25, 0.25, generator)) / radius


def _distance(x: torch.Tensor, y: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """Signed distance to the outline of each image's shape, negative inside, [n, 32, 32], in radii.

    Args:
        x: positions [n, 32, 32], in radii, to the right.
        y: likewise, downwards.
        shape: int64 [n], 0 to 4.
    """
    from_centre = (x * x + y * y).sqrt()
    along, across = x.abs(), y.abs()
    bar, other_bar = torch.maximum(along, 3 * across), torch.maximum(3 * along, across)
    outlines = (
        from_centre - 0.9,  # disc
        torch.maximum(along, across) - 0.8,  # square
        torch.maximum(0.866 * along + 0.5 * y, -y) - 0.55,  # triangle
        torch.minimum(bar, other_bar) - 1.0,  # cross
        (from_centre - 0.75).abs() - 0.25,  # ring
    )
    return torch.stack(outlines, dim=1)[torch.arange(len(shape)), shape]


def _coverage(distance: torch.Tensor) -> torch.Tensor:
    """Share of each pixel that lies inside, by a ramp of about a pixel's width at the outline."""
    return (0.5 - distance * 8).clamp_(0, 1)


def _texture(texture: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Stripes (0) or checks (1) of random angle, phase and period, [n, 32, 32], from 0 to 1."""
    n = len(texture)
    u, v = _rotated(n, generator)
    frequency = _uniform(n, 8, 13, generator)  # radians per half image: periods of 8 to 15 pixels
    waves = torch.sin(u * frequency + _uniform(n, 0, 2 * math.pi, generator))
    across = torch.sin(v * frequency + _uniform(n, 0, 2 * math.pi, generator))
    waves *= torch.where(texture.view(n, 1, 1) == 1, across, torch.ones(()))
    return (waves * 3).clamp_(-1, 1) * 0.5 + 0.5


def _two_colours(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two random colours per image, each [n, 3, 1, 1], that differ by 0.7 in one channel and by less in the others."""
    middle = torch.rand(n, 3, 1, 1, generator=generator) * 0.3 + 0.35
    direction = torch.randn(n, 3, 1, 1, generator=generator)
    half_difference = direction / direction.abs().amax(dim=1, keepdim=True) * 0.35
    return middle + half_difference, middle - half_difference


def _blotches(n: int, generator: torch.Generator) -> torch.Tensor:
    """Smooth random colour at two scales, [n, 3, 32, 32], centred at 0.5."""
    coarse = torch.randn(n, 3, 4, 4, generator=generator) * 0.10
    fine = torch.randn(n, 3, 11, 11, generator=generator) * 0.05
    size = (_SIZE, _SIZE)
    large, small = (functional.interpolate(m, size=size, mode="bilinear", align_corners=True) for m in (coarse, fine))
    return large + small + 0.5
