"""Data sets that need no download: handwritten digits that are part of scikit-learn, and generated images of shapes."""

import dataclasses
import functools
import hashlib
import importlib.util
import math
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Le
from torch.nn import functional
from typing_extensions import Doc, override

from bench.datasets.base import IMAGE_SIZE, DatasetError, ImageDataset, Samples
from collectives.options import Count

_WHITE = 16  # the brightest level in the source


@dataclasses.dataclass(kw_only=True)
class Digits(ImageDataset, name="digits"):
    """Digits: 1797 real handwritten digits that are part of scikit-learn, enlarged to 3x32x32.

    Source: Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI Machine Learning Repository, the
    test part, as in `sklearn.datasets.load_digits`.
    Differs: 8x8 pixels of 17 grey levels become 32x32 pixels of 256 levels by bilinear interpolation, the same in all
    three channels; the split into training and test part is this project's.

    Loads 1347 training and 450 test images in ten classes; the split is fixed and stratified.
    """

    num_classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, float, float]] = (0.3056, 0.3056, 0.3056)
    std: ClassVar[tuple[float, float, float]] = (0.3238, 0.3238, 0.3238)
    mirror: ClassVar[bool] = False

    @override
    def sizes(self) -> tuple[int, int]:
        return 1347, 450

    @override
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Samples, Samples]:
        train_size, test_size = self.resolve_sizes(train_size, test_size)
        train, test = _parts()
        return train.subset(train_size), test.subset(test_size)


@functools.cache
def _parts() -> tuple[Samples, Samples]:
    """Return (training set, test set) of 3x32x32 images; the source is read only once per process.

    In each class, every fourth image is a test image, so that the test set has a quarter of each class.
    """
    grey, labels = _source()
    large = functional.interpolate(grey.float().unsqueeze(1), size=(32, 32), mode="bilinear", align_corners=False)
    images = (large * (255 / _WHITE)).round().to(torch.uint8).repeat(1, 3, 1, 1)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[labels.argsort(stable=True)[::4]] = True
    return (
        Samples(inputs=images[~is_test], targets=labels[~is_test]),
        Samples(inputs=images[is_test], targets=labels[is_test]),
    )


def _source() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (images, labels) as scikit-learn's `load_digits` does: float64 [1797, 8, 8] from 0 to 16; int64 [1797].

    If scikit-learn's data file is in its usual place, this function reads the file itself, because importing
    scikit-learn would take every rank a second of CPU time.
    """
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz" if package and package.origin else None
    if file is not None and file.is_file():
        table = torch.from_numpy(np.loadtxt(file, delimiter=","))
        return table[:, :-1].reshape(-1, 8, 8), table[:, -1].to(torch.int64)
    from sklearn.datasets import load_digits

    source = load_digits()
    return torch.from_numpy(source.images), torch.from_numpy(source.target).to(torch.int64)


_NUM_SHAPES = 5
_NUM_TEXTURED = 2 * _NUM_SHAPES
_BLOCK = 500  # images of 32x32 generated at once: small enough for a core's cache


@dataclasses.dataclass(kw_only=True)
class Synthetic(ImageDataset, name="synthetic"):
    """Synthetic: generated images of textured shapes, in any number and size, without a download.

    A class is one of five shapes (disc, square, triangle, cross, ring) with one of two textures (stripes, checks).
    Position, size, rotation, colours, the phase and period of the texture, the blotches of the background and the noise
    are random for every image and independent of the class. A shape may be brighter or darker than its surroundings, so
    no single pixel helps: a linear model stays near random guessing, while a small convolutional network learns the
    task in a few epochs. With more than ten classes, every group of ten has its own axis in colour space, along which a
    shape's two colours differ.

    Generates images of balanced classes: every `classes` consecutive images contain each class once.

    Each rank generates the same images from the run's seed, with its own random generators. Image i of the training or
    test set does not depend on the number of images, so a smaller set is the beginning of a larger set.
    """

    mean: ClassVar[tuple[float, float, float]] = (0.5, 0.5, 0.5)
    std: ClassVar[tuple[float, float, float]] = (0.141, 0.141, 0.141)
    mirror: ClassVar[bool] = True

    train_size: Annotated[Count, Doc("number of training samples, unless the run sets it")] = 10_000
    test_size: Annotated[Count, Doc("number of test samples, unless the run sets it")] = 2_000
    noise: Annotated[float, Ge(0), Le(1), Doc("noise on every pixel, as a share of white; more is harder")] = 0.05
    size: Annotated[
        int, Ge(8), Le(1024), Doc("side of an image in pixels; at 224 a sample takes 150 kB of memory and 5 ms to make")
    ] = IMAGE_SIZE
    classes: Annotated[int, Ge(2), Le(10_000), Doc("number of classes")] = _NUM_TEXTURED

    @property
    @override
    def num_classes(self) -> int:
        return self.classes

    @property
    @override
    def image_size(self) -> int:
        return self.size

    @override
    def sizes(self) -> tuple[int, int]:
        return self.train_size, self.test_size  # `load` can generate more

    @override
    def _resolve_size(self, part: str, wanted: int | None, whole: int) -> int:
        size = whole if wanted is None else wanted
        if size < 1:
            raise DatasetError(f"{self.component_name} makes at least one {part} sample, so {size} are not possible")
        return size

    @override
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Samples, Samples]:
        train_size, test_size = self.resolve_sizes(train_size, test_size)
        return self._generate("train", train_size, seed), self._generate("test", test_size, seed)

    def _generate(self, part: str, size: int, seed: int) -> Samples:
        images = torch.empty(size, 3, self.size, self.size, dtype=torch.uint8)
        labels = torch.empty(size, dtype=torch.int64)
        rounds = max(1, _BLOCK // self.classes)
        at_once = max(1, _BLOCK * IMAGE_SIZE**2 // self.size**2)
        axes = _axes(math.ceil(self.classes / _NUM_TEXTURED)) if self.classes > _NUM_TEXTURED else None
        for start in range(0, size, rounds * self.classes):
            digest = hashlib.sha256(f"{seed}/{part}/{start}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            # each class once in every round, in random order
            wanted = torch.rand(rounds, self.classes, generator=generator).argsort(dim=1).flatten()
            for first, some in zip(range(start, size, at_once), wanted.split(at_once), strict=False):
                span = slice(first, min(first + len(some), size))
                labels[span] = some[: size - first]
                # Always draw the whole block, because the generator's next numbers depend on how many it has drawn.
                images[span] = self._draw(some, axes, generator)[: size - first]
        return Samples(inputs=images, targets=labels)

    def _draw(self, labels: torch.Tensor, axes: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
        """Draw one image per label, and return the images as uint8 [n, 3, size, size].

        Args:
            labels: class of each image, int64 [n].
            axes: one axis in colour space per group of ten classes, [groups, 3]; None: random axes.
            generator: the random generator.
        """
        n = len(labels)
        x, y = _object_coordinates(n, self.size, generator)
        # the share of each pixel inside the shape, with a ramp of about one pixel at the outline
        inside = (0.5 - _distance(x, y, labels % _NUM_SHAPES) * (self.size / 4)).clamp_(0, 1).unsqueeze(1)
        weight = _texture(labels // _NUM_SHAPES % 2, self.size, generator).unsqueeze(1)
        bright, dark = _two_colours(n, None if axes is None else axes[labels // _NUM_TEXTURED], generator)
        figure = dark + (bright - dark) * weight
        background = _blotches(n, self.size, generator)
        image = background + (figure - background) * inside
        image += self.noise * torch.randn(image.shape, generator=generator)
        return (image * 255).round_().clamp_(0, 255).to(torch.uint8)


def _axes(count: int) -> torch.Tensor:
    """Return `count` unit vectors in colour space, [count, 3], evenly spread over half a sphere.

    Half a sphere is enough, because a vector and its opposite are the same axis.
    """
    height = (torch.arange(count) + 0.5) / count
    angle = torch.arange(count) * (math.pi * (3 - math.sqrt(5)))  # the golden angle: a Fibonacci lattice
    radius = (1 - height**2).sqrt()
    return torch.stack([radius * angle.cos(), radius * angle.sin(), height], dim=1)


def _uniform(n: int, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """Return n random numbers, uniform from `low` to `high`, as [n, 1, 1], to broadcast with [n, size, size]."""
    return torch.rand(n, 1, 1, generator=generator) * (high - low) + low


def _rotated(n: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x, y) of all pixel centres, rotated by a random angle per image; both are [n, size, size].

    Before the rotation by -0.5 to 0.5 radians, x and y run from -1 to 1 across the image.
    """
    x = ((torch.arange(size) + 0.5) * (2 / size) - 1).view(1, -1)
    y = x.view(-1, 1)
    angle = _uniform(n, -0.5, 0.5, generator)
    return x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()


def _object_coordinates(n: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x, y) of all pixels relative to a randomly moved, rotated and scaled shape.

    Both are [n, size, size], in units of the shape's radius; the radius is 0.5 to 0.85 of half the image.
    """
    x, y = _rotated(n, size, generator)
    radius = _uniform(n, 0.5, 0.85, generator)
    return (x - _uniform(n, -0.25, 0.25, generator)) / radius, (y - _uniform(n, -0.25, 0.25, generator)) / radius


def _texture(texture: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    """Return one texture per image, [n, size, size] from 0 to 1, with random angle, phase and period.

    Args:
        texture: 0 for stripes or 1 for checks, int64 [n].
        size: side of an image in pixels.
        generator: the random generator.
    """
    n = len(texture)
    u, v = _rotated(n, size, generator)
    frequency = _uniform(n, 8, 13, generator)  # radians per half image; with 32 pixels, periods of 8 to 13 pixels
    waves = torch.sin(u * frequency + _uniform(n, 0, 2 * math.pi, generator))
    across = torch.sin(v * frequency + _uniform(n, 0, 2 * math.pi, generator))
    waves *= torch.where(texture.view(n, 1, 1) == 1, across, torch.ones(()))
    return (waves * 3).clamp_(-1, 1) * 0.5 + 0.5


def _distance(x: torch.Tensor, y: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """Return each pixel's distance to the outline of its image's shape, [n, size, size], in radii; negative inside.

    Args:
        x: horizontal positions [n, size, size] in radii, positive to the right.
        y: vertical positions [n, size, size] in radii, positive downwards.
        shape: 0 disc, 1 square, 2 triangle, 3 cross, 4 ring; int64 [n].
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


def _two_colours(n: int, axis: torch.Tensor | None, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two random colours per image, each [n, 3, 1, 1], that differ by 0.7 in one channel and less in the others.

    Args:
        n: number of images.
        axis: direction in colour space along which each image's two colours differ, [n, 3]; None: random directions.
        generator: the random generator.
    """
    middle = torch.rand(n, 3, 1, 1, generator=generator) * 0.3 + 0.35
    direction = torch.randn(n, 3, 1, 1, generator=generator) if axis is None else axis.view(n, 3, 1, 1)
    half_difference = direction / direction.abs().amax(dim=1, keepdim=True) * 0.35
    return middle + half_difference, middle - half_difference


def _blotches(n: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Return n random backgrounds with smooth blotches of two sizes, [n, 3, size, size], around the value 0.5."""
    coarse = torch.randn(n, 3, 4, 4, generator=generator) * 0.10
    fine = torch.randn(n, 3, 11, 11, generator=generator) * 0.05
    large, small = (
        functional.interpolate(m, size=(size, size), mode="bilinear", align_corners=True) for m in (coarse, fine)
    )
    return large + small + 0.5
