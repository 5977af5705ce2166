"""Folders of images of your own, a folder per class, as in ImageNet: `imagefolder:path=FOLDER,size=224`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, ClassVar, cast

import torch
from annotated_types import Ge, Le
from PIL import Image
from torchvision.datasets import ImageFolder as Folder
from torchvision.transforms.v2 import functional
from typing_extensions import Doc, override

from bench.datasets.base import DatasetError, ImageDataset, LazyInputs, Samples
from collectives.options import Count

_TEST_FOLDERS = ("val", "test")
# Images are stored this much larger than the network gets them, so that training can cut out a random part.
_MARGIN = 256 / 224
_READY = "ready"


@dataclasses.dataclass(kw_only=True)
class ImageFolder(ImageDataset):
    """Images in `path/train/CLASS/` and `path/val/CLASS/` (or `path/test/CLASS/`), read when a batch needs them.

    Source of preprocessing: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), section 3.4,
    with one scale: the shorter side becomes 256/224 of `size`; training cuts out a random square of `size` or its
    mirror image, evaluation the central one.
    """

    mean: ClassVar[tuple[float, float, float]] = (0.485, 0.456, 0.406)  # of ImageNet
    std: ClassVar[tuple[float, float, float]] = (0.229, 0.224, 0.225)
    mirror: ClassVar[bool] = True

    path: Annotated[str, Doc("the folder that contains train and val")] = "images"
    size: Annotated[int, Ge(8), Le(1024), Doc("side of the images that the network gets, in pixels")] = 224
    readers: Annotated[Count, Doc("threads with which each rank reads and decodes images")] = 2

    @property
    @override
    def num_classes(self) -> int:
        return len(_folders(self.path)[0].classes) if self.is_present(Path()) else 0

    @property
    @override
    def image_size(self) -> int:
        return self.size

    @override
    def sizes(self) -> tuple[int, int]:
        train, test = _folders(self.path) if self.is_present(Path()) else ((), ())
        return len(train), len(test)

    @override
    def resolve_sizes(self, train_size: int | None, test_size: int | None) -> tuple[int, int]:
        _folders(self.path)  # raises an error that says what is missing
        return super().resolve_sizes(train_size, test_size)

    @override
    def is_present(self, data_dir: Path) -> bool:
        return self.status(data_dir) == _READY

    @override
    def status(self, data_dir: Path) -> str:
        try:
            _folders(self.path)
        except DatasetError as error:
            return str(error)
        return _READY

    @override
    def prepare(self, data_dir: Path) -> None:
        _folders(self.path)  # raises an error that says what is missing

    @override
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Samples, Samples]:
        train_size, test_size = self.resolve_sizes(train_size, test_size)
        train, test = (
            Samples(
                inputs=_Images([path for path, _ in folder.samples], round(self.size * _MARGIN), self.readers),
                targets=torch.tensor(folder.targets),
            )
            for folder in _folders(self.path)
        )
        return train.subset(train_size), test.subset(test_size)

    @override
    def augment(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        places = torch.randint(inputs.shape[-1] - self.size + 1, (len(inputs), 2), generator=generator).tolist()
        mirrored = torch.randint(2, (len(inputs),), generator=generator).tolist()
        cut = [
            image[:, top : top + self.size, left : left + self.size]
            for image, (top, left) in zip(inputs, places, strict=True)
        ]
        return torch.stack([part.flip(-1) if flip else part for part, flip in zip(cut, mirrored, strict=True)])

    @override
    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().normalise(functional.center_crop(inputs, [self.size]))


class _Images(LazyInputs):
    """Images in files, read when they are used: uint8 [3, side, side].

    Args:
        paths: the files.
        side: the shorter side is scaled to this many pixels, and the longer side is cut to as many.
        threads: number of threads that read.
    """

    def __init__(self, paths: list[str], side: int, threads: int) -> None:
        self._paths = paths
        self._side = side
        self._threads = threads

    @override
    def __len__(self) -> int:
        return len(self._paths)

    @override
    def __getitem__(self, chosen: torch.Tensor | slice) -> torch.Tensor:
        indices = range(len(self))[chosen] if isinstance(chosen, slice) else chosen.tolist()
        with ThreadPoolExecutor(self._threads) as pool:
            return torch.stack(list(pool.map(self._read, (self._paths[index] for index in indices))))

    @override
    def select(self, indices: torch.Tensor) -> _Images:
        return _Images([self._paths[index] for index in indices.tolist()], self._side, self._threads)

    def _read(self, path: str) -> torch.Tensor:
        try:
            with Image.open(path) as image:
                pixels = functional.pil_to_tensor(image.convert("RGB"))
        except (OSError, Image.DecompressionBombError) as error:
            raise DatasetError(f"{path} cannot be read as an image ({error}); repair or remove it") from None
        resized = functional.resize(pixels, [self._side], antialias=True)
        return cast(torch.Tensor, functional.center_crop(resized, [self._side]))


@functools.lru_cache(maxsize=1)  # looking through a million files takes seconds
def _folders(path: str) -> tuple[Folder, Folder]:
    """Return the training and the test folder, with the same classes.

    Raises:
        DatasetError: a folder is missing or empty, or the classes differ; the message is one sentence.
    """
    test = next((name for name in _TEST_FOLDERS if Path(path, name).is_dir()), None)
    if not Path(path, "train").is_dir() or test is None:
        raise DatasetError(
            f"imagefolder needs the folders {path}/train and {path}/val, with a folder of images per class; give the "
            "folder that contains them as imagefolder:path=FOLDER"
        )
    try:
        train, held_out = (Folder(str(Path(path, name))) for name in ("train", test))
    except OSError as error:
        raise DatasetError(f"imagefolder cannot use {path} ({' '.join(str(error).split())})") from None
    if train.classes != held_out.classes:
        other = next(a or b for a, b in itertools.zip_longest(train.classes, held_out.classes) if a != b)
        raise DatasetError(f"{path}/train and {path}/{test} have different classes, such as {other}; make them equal")
    return train, held_out
