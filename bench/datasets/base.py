"""What a data set component is: options, where it lies, and its images as tensors in memory."""

from __future__ import annotations

import abc
import dataclasses
from pathlib import Path
from typing import ClassVar

import torch

from bench.core.errors import UsageError
from collectives.options import Options

IMAGE_SIZE = 32
"""Side of an image in pixels, unless a data set says otherwise."""


class DatasetError(UsageError):
    """A data set that is absent, corrupt or too small; the message is one sentence for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Images and labels of a training or test set.

    Attributes:
        images: uint8 [num_samples, 3, image_size, image_size].
        labels: int64 [num_samples].
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, size: int) -> Part:
        """`size` of the samples, in their order, each class as frequent as in the whole part (to within one sample).

        The choice depends on nothing but the labels, and a smaller subset lies inside every larger one.

        Args:
            size: 1 to `len(self)`.
        """
        return self if size == len(self) else self._at(self._order()[:size])

    def split(self, size: int) -> tuple[Part, Part]:
        """(the other samples, `subset(size)`); no sample is in both.

        Args:
            size: 1 to `len(self)` - 1.
        """
        order = self._order()
        return self._at(order[size:]), self._at(order[:size])

    def _order(self) -> torch.Tensor:
        """int64 indices, any prefix of which holds an equal share of each class."""
        # A class's i-th of n samples stands at (i + 1/2) / n: any prefix of that order holds an equal share of each.
        place = torch.empty(len(self), dtype=torch.float64)
        for label in range(int(self.labels.max()) + 1):
            members = (self.labels == label).nonzero().flatten()
            place[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
        return place.argsort(stable=True)

    def _at(self, indices: torch.Tensor) -> Part:
        chosen = indices.sort().values
        return Part(images=self.images[chosen], labels=self.labels[chosen])


@dataclasses.dataclass(kw_only=True)
class Dataset(Options, abc.ABC):
    """Square colour images in classes. One file, one class, named after the file.

    Class facts:
        mean, std: per channel, of pixel values scaled to [0, 1]: what normalisation subtracts and divides by.
        mirror: a mirrored image keeps its label (true for photographs, false for digits), so augmentation may flip.
    """

    mean: ClassVar[tuple[float, float, float]]
    std: ClassVar[tuple[float, float, float]]
    mirror: ClassVar[bool]

    @property
    @abc.abstractmethod
    def num_classes(self) -> int:
        """Number of labels; a class variable where it is always the same."""

    @property
    def image_size(self) -> int:
        """Side of an image in pixels."""
        return IMAGE_SIZE

    @abc.abstractmethod
    def sizes(self) -> tuple[int, int]:
        """(training samples, test samples) of the whole set, without loading it."""

    def resolve_sizes(self, train_size: int | None, test_size: int | None) -> tuple[int, int]:
        """(training samples, test samples) that `load` returns for these arguments, without loading anything.

        Raises:
            DatasetError: "digits has 1347 training samples, so 5000 are not possible; ask for 1 to 1347".
        """
        whole_train, whole_test = self.sizes()
        return (
            self._resolve_size("training", train_size, whole_train),
            self._resolve_size("test", test_size, whole_test),
        )

    def _resolve_size(self, part: str, asked: int | None, whole: int) -> int:
        size = whole if asked is None else asked
        if not 1 <= size <= whole:
            raise DatasetError(
                f"{self.component_name} has {whole} {part} samples, so {size} are not possible; ask for 1 to {whole}"
            )
        return size

    def status(self, data_dir: Path) -> str:
        """One line for `bench data` and `bench doctor`: what is there, e.g. "built in, nothing to prepare"."""
        return "built in, nothing to prepare"

    def is_present(self, data_dir: Path) -> bool:
        """The set can be loaded without a network."""
        return True

    def prepare(self, data_dir: Path) -> None:
        """Fetch and verify what `load` needs; nothing to do for built-in sets.

        Raises:
            DatasetError: one sentence that says what is wrong and what to do.
        """

    @abc.abstractmethod
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Part, Part]:
        """(training part, test part) in memory; never touches the network.

        Args:
            data_dir: folder that `prepare` filled.
            seed: the run's seed; a fixed set ignores it.
            train_size: use only this many training samples, the classes kept balanced as in the whole set (None: all).
            test_size: likewise for the test set.

        Raises:
            DatasetError: absent, corrupt, or fewer samples than asked for.
        """
