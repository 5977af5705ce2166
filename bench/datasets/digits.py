"""Digits: 1797 real handwritten digits that are part of scikit-learn, enlarged to 3x32x32.

Source: Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI Machine Learning Repository, its test
part, as in `sklearn.datasets.load_digits`.
Differs: 8x8 pixels of 17 grey levels become 32x32 of 256 by bilinear interpolation, the same in all three channels; the
split into training and test part is this project's.
"""

import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional
from typing_extensions import override

from bench.datasets.base import Dataset, ImageSet

_WHITE = 16  # the brightest level in the source


@dataclasses.dataclass(kw_only=True)
class Digits(Dataset):
    """Load 1347 training and 450 test images in ten classes; the split is fixed and stratified."""

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
    ) -> tuple[ImageSet, ImageSet]:
        train_size, test_size = self.resolve_sizes(train_size, test_size)
        train, test = _parts()
        return train.subset(train_size), test.subset(test_size)


@functools.cache
def _parts() -> tuple[ImageSet, ImageSet]:
    """Return (training set, test set) of 3x32x32 images; they are read once per process.

    Every fourth image is a test image, counted class by class, so that the test set includes a quarter of each class.
    """
    grey, labels = _source()
    large = functional.interpolate(grey.float().unsqueeze(1), size=(32, 32), mode="bilinear", align_corners=False)
    images = (large * (255 / _WHITE)).round().to(torch.uint8).repeat(1, 3, 1, 1)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[labels.argsort(stable=True)[::4]] = True
    return (
        ImageSet(images=images[~is_test], labels=labels[~is_test]),
        ImageSet(images=images[is_test], labels=labels[is_test]),
    )


def _source() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, float64 [1797, 8, 8] from 0 to 16, and labels, int64 [1797], as scikit-learn's `load_digits` does.

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
