"""Your own images, in one folder per class, as in ImageNet: `imagefolder:path=FOLDER,size=224`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, ClassVar, cast

import torch
from annotated_types import Ge, Le
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2 import functional
from typing_extensions import Doc, override

from bench.datasets.base import DatasetError, ImageDataset, LazyInputs, Samples
from bench.datasets.folders import LeftOut, find_files, note_of
from collectives.options import Count

_TEST_FOLDERS = ("val", "test")
# Images are scaled to this many times the network's input size, so that training can cut out a random part.
_MARGIN = 256 / 224
_READY = "ready"


@dataclasses.dataclass(kw_only=True)
class ImageFolder(ImageDataset):
    """Images in `path/train/CLASS/` and `path/val/CLASS/` (or `path/test/CLASS/`), read when a batch needs them.

    Source of preprocessing: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), section 3.4,
    with one scale: the shorter side becomes 256/224 of `size`; training cuts out a random square of `size` and may
    mirror it, evaluation cuts out the central square.
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
        if not self.is_present(Path()):
            return 0, 0
        train, test = _folders(self.path)
        return len(train.paths), len(test.paths)

    @override
    def resolve_sizes(self, train_size: int | None, test_size: int | None) -> tuple[int, int]:
        _folders(self.path)  # raises an error that says what is missing
        return super().resolve_sizes(train_size, test_size)

    @override
    def warnings(self) -> list[str]:
        return note_of(
            self.component_name, tuple(sorted(each for part in _folders(self.path) for each in part.left_out))
        )

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
                inputs=_Images(part.paths, round(self.size * _MARGIN), self.readers),
                targets=torch.tensor(part.targets),
            )
            for part in _folders(self.path)
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
    """Images in files, which are read when they are used: uint8 [3, side, side].

    Args:
        paths: the files.
        side: the shorter side is scaled to this many pixels, and the longer side is cut to the same length.
        threads: number of threads that read files.
    """

    def __init__(self, paths: Sequence[str], side: int, threads: int) -> None:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """The training or the test images.

    Attributes:
        classes: names of the classes, sorted.
        paths: the images, sorted by class, folder and name.
        targets: the class of each image, as an index into `classes`.
        left_out: (reason, name) of each file and folder that is left out.
    """

    classes: Sequence[str]
    paths: Sequence[str]
    targets: Sequence[int]
    left_out: LeftOut

    @classmethod
    def of(cls, folder: Path) -> _Part:
        """Find the images below `folder`, which contains one folder per class.

        Raises:
            DatasetError: there is no class folder, or a class folder has no image; the message is one sentence.
            OSError: a folder cannot be read.
        """
        inside = sorted(folder.iterdir())
        classes = [path for path in inside if not path.name.startswith(".") and path.is_dir()]
        left_out = [("outside the folders of classes", str(path)) for path in inside if path not in classes]
        paths, targets = [], []
        for target, path in enumerate(classes):
            listing, others = find_files(path)
            left_out += [(reason, str(path / name)) for reason, name in others]
            images = []
            for name in sorted((name for name, _, _ in listing), key=os.path.split):
                if name.lower().endswith(IMG_EXTENSIONS):
                    images.append(name)
                else:
                    left_out.append(("without the ending of an image", str(path / name)))
            if not images:
                endings = ", ".join(IMG_EXTENSIONS)
                raise DatasetError(f"{path} has no image that can be read; add one ({endings}), or remove the folder")
            paths += [str(path / name) for name in images]
            targets += [target] * len(images)
        if not classes:
            raise DatasetError(f"{folder} has no folders; give it a folder of images for each class")
        return cls(classes=[path.name for path in classes], paths=paths, targets=targets, left_out=tuple(left_out))


@functools.lru_cache(maxsize=1)  # because looking through a million files takes seconds
def _folders(path: str) -> tuple[_Part, _Part]:
    """Return (training images, test images), which have the same classes.

    Raises:
        DatasetError: a folder is missing or empty, or the classes differ; the message is one sentence.
    """
    try:
        test = next((name for name in _TEST_FOLDERS if Path(path, name).is_dir()), None)
        if not Path(path, "train").is_dir() or test is None:
            raise DatasetError(
                f"imagefolder needs the folders {path}/train and {path}/val, with a folder of images per class; give "
                "the folder that contains them as imagefolder:path=FOLDER"
            )
        train, held_out = (_Part.of(Path(path, name)) for name in ("train", test))
    except OSError as error:
        raise DatasetError(f"imagefolder cannot read {error.filename} ({error.strerror})") from None
    if train.classes != held_out.classes:
        other = next(a or b for a, b in itertools.zip_longest(train.classes, held_out.classes) if a != b)
        raise DatasetError(f"{path}/train and {path}/{test} have different classes, such as {other}; make them equal")
    return train, held_out
