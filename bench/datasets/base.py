"""The interface of data sets: a component has options, its place on disk, and images as tensors in memory."""

from __future__ import annotations

import abc
import dataclasses
from pathlib import Path
from typing import ClassVar

import torch

from bench.core.errors import UsageError
from collectives.options import Options

# Side of an image in pixels, unless a data set overrides it.
IMAGE_SIZE = 32


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
        """Return `size` samples in their order, with the classes' shares of the whole part, exact to one sample.

        The choice depends only on the labels, and a smaller subset is part of every larger one.

        Args:
            size: 1 to `len(self)`.
        """
        return self if size == len(self) else self._at(self._order()[:size])

    def split(self, size: int) -> tuple[Part, Part]:
        """Return the other samples and `subset(size)`; no sample is in both.

        Args:
            size: 1 to `len(self)` - 1.
        """
        order = self._order()
        return self._at(order[size:]), self._at(order[:size])

    def _order(self) -> torch.Tensor:
        """Return int64 indices in an order of which any prefix has an equal share of each class."""
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
    """Base of all data sets of square colour images with labels. A subclass is named after its file.

    Class facts:
        mean, std: mean and standard deviation per channel, of pixel values scaled to [0, 1], for normalisation.
        mirror: augmentation may flip images, because a mirrored image keeps its label (photographs, but not digits).
    """

    mean: ClassVar[tuple[float, float, float]]
    std: ClassVar[tuple[float, float, float]]
    mirror: ClassVar[bool]

    @property
    @abc.abstractmethod
    def num_classes(self) -> int:
        """Return the number of labels; a class variable may replace this property."""

    @property
    def image_size(self) -> int:
        """Return the side of an image in pixels."""
        return IMAGE_SIZE

    @abc.abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Return the numbers of training and test samples in the whole set, without loading it."""

    def resolve_sizes(self, train_size: int | None, test_size: int | None) -> tuple[int, int]:
        """Return the numbers of training and test samples that `load` returns for these arguments, without loading.

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
        """Return one line for `bench data` and `bench doctor`, such as "built in, nothing to prepare"."""
        return "built in, nothing to prepare"

    def is_present(self, data_dir: Path) -> bool:
        """Return True if the set can be loaded without network access."""
        return True

    def prepare(self, data_dir: Path) -> None:
        """Download and verify what `load` needs; built-in sets do nothing.

        Raises:
            DatasetError: it failed; the message is one sentence that says why and what to do.
        """

    @abc.abstractmethod
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Part, Part]:
        """Load the training and the test part into memory, without network access.

        Args:
            data_dir: folder into which `prepare` has written.
            seed: the run's seed; a fixed set ignores it.
            train_size: number of training samples, with the classes' shares of the whole set; None: all.
            test_size: number of test samples, in the same way.

        Raises:
            DatasetError: the set is missing or damaged, or has fewer samples than requested.
        """
