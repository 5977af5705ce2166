"""The interface of data sets: a component consists of options and methods that check its files and load samples.

Source of `crop_and_flip`: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2: four
pixels of padding on each side, then a random 32x32 crop of the padded image or of its mirror image.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Protocol, Self

import torch
from torch.nn import functional
from typing_extensions import override

from bench.core.errors import UsageError
from collectives.options import Options

# Side of an image in pixels, unless a data set overrides it.
IMAGE_SIZE = 32
GOLDEN_RATIO = (1 + 5**0.5) / 2


class DatasetError(UsageError):
    """A data set is missing, damaged or too small; the message is one sentence for the user."""


class Task(Protocol):
    """A task, such as classification: the training loss, and what an evaluation measures.

    The network predicts every element of `targets`: one per sample in classification, one per byte for a language
    model.

    Attributes:
        metric: the column with the quality of a network: test_accuracy or test_bits_per_byte.
    """

    metric: ClassVar[Literal["test_accuracy", "test_bits_per_byte"]]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
        """Return the mean loss over all predictions, a scalar for backward.

        Args:
            outputs: what the network returned.
            targets: what the network should predict.
            label_smoothing: share of each target that is spread evenly over all classes, as in torch's cross-entropy.
        """

    def sum_loss_and_correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of the losses in nats, number of correct predictions), both scalar tensors."""

    def output_error(self, outputs: object, num_samples: int, num_classes: int) -> str:
        """Return a description of what is wrong with the outputs for `num_samples` samples; empty if they are valid."""


class Classification(Task):
    """Classification: cross-entropy of logits [n, num_classes] against labels, int64 [n]."""

    metric = "test_accuracy"

    @override
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets, label_smoothing=label_smoothing)

    @override
    def sum_loss_and_correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses = functional.cross_entropy(outputs, targets, reduction="sum")
        return losses.double(), (outputs.argmax(1) == targets).sum()

    @override
    def output_error(self, outputs: object, num_samples: int, num_classes: int) -> str:
        if not isinstance(outputs, torch.Tensor):
            return f"returns {type(outputs).__name__} instead of a tensor of logits"
        if tuple(outputs.shape) != (num_samples, num_classes):
            shape = "x".join(map(str, outputs.shape)) or "a single number"
            return f"returns {shape} for {num_samples} samples instead of {num_samples}x{num_classes} logits"
        return ""


CLASSIFICATION = Classification()


class LazyInputs(Protocol):
    """Inputs of samples, such as image files, that are read only when they are used."""

    def __len__(self) -> int: ...

    def __getitem__(self, chosen: torch.Tensor | slice) -> torch.Tensor:
        """Read some inputs, given by int64 indices [n] or a slice, and return them as one tensor [n, ...]."""

    def select(self, indices: torch.Tensor) -> LazyInputs:
        """Return only the inputs with these int64 indices [n], without reading them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples of a training or test set.

    Attributes:
        inputs: the network's inputs before normalisation: [num_samples, ...]; images are uint8 [num_samples, 3, height,
            width].
        targets: what the network has to predict, whole numbers [num_samples, ...]: class labels, int64 [num_samples],
            or the next byte at each position of a text, uint8 [num_samples, context].
    """

    inputs: torch.Tensor | LazyInputs
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def num_predictions(self) -> int:
        """Return the number of targets in all samples together."""
        return len(self) * math.prod(self.targets.shape[1:])

    def at(self, chosen: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, targets) of some samples, given by int64 indices [n] or a slice."""
        if isinstance(chosen, torch.Tensor):
            chosen = chosen.to(self.targets.device)
        return self.inputs[chosen], self.targets[chosen]

    def on(self, device: torch.device) -> Self:
        """Return the samples, moved to a device; lazy inputs are not moved."""
        inputs = self.inputs.to(device) if isinstance(self.inputs, torch.Tensor) else self.inputs
        return dataclasses.replace(self, inputs=inputs, targets=self.targets.to(device))

    def keep(self, indices: torch.Tensor) -> Samples:
        """Return samples with the same length and indices as these, of which only some are kept in memory.

        Args:
            indices: int64 [n], ascending: the samples to keep; they are copied, unless all samples are kept.
        """
        if len(indices) == len(self):
            return self
        kept = self._at(indices)
        return KeptSamples(inputs=kept.inputs, targets=kept.targets, indices=indices, size=len(self))

    def subset(self, size: int) -> Samples:
        """Return `size` of the samples in their original order; each class keeps its share, to within one sample.

        The choice depends only on the labels, and a smaller subset is contained in every larger subset. Windows of a
        text have no classes, so the chosen windows are spread evenly over the text.

        Args:
            size: 1 to `len(self)`.
        """
        return self if size == len(self) else self._at(self._order()[:size])

    def split(self, size: int) -> tuple[Samples, Samples]:
        """Return (all samples that are not in `subset(size)`, `subset(size)`).

        Args:
            size: 1 to `len(self)` - 1.
        """
        order = self._order()
        return self._at(order[size:]), self._at(order[:size])

    def _order(self) -> torch.Tensor:
        """Return the indices of all samples, int64 [num_samples], with the classes mixed evenly.

        In any prefix, each class has the same share as in the whole set, to within one sample.
        """
        if self.targets.dim() > 1:  # by multiples of the golden ratio, so that any prefix is spread evenly
            return (torch.arange(len(self), dtype=torch.float64) * GOLDEN_RATIO % 1).argsort(stable=True)
        # The i-th of a class's n samples is placed at (i + 1/2) / n, so any prefix of this order has an equal share of
        # each class.
        place = torch.empty(len(self), dtype=torch.float64)
        for label in range(int(self.targets.max()) + 1):
            members = (self.targets == label).nonzero().flatten()
            place[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
        return place.argsort(stable=True)

    def _at(self, indices: torch.Tensor) -> Samples:
        chosen = indices.sort().values
        inputs = self.inputs[chosen] if isinstance(self.inputs, torch.Tensor) else self.inputs.select(chosen)
        return Samples(inputs=inputs, targets=self.targets[chosen])


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptSamples(Samples):
    """Samples of which only those that one rank uses are in memory; they are read by their indices in the whole set.

    Attributes:
        inputs, targets: inputs and targets of the samples that are in memory.
        indices: int64, ascending: for each sample in memory, its index in the whole set.
        size: number of samples of the whole set.
    """

    indices: torch.Tensor
    size: int

    @override
    def __len__(self) -> int:
        return self.size

    @override
    def at(self, chosen: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.arange(self.size)[chosen] if isinstance(chosen, slice) else chosen
        places = torch.searchsorted(self.indices, chosen).clamp(max=len(self.indices) - 1)
        assert torch.equal(self.indices[places], chosen), "a rank reads samples that it does not keep"
        return super().at(places)

    @override
    def _order(self) -> torch.Tensor:
        raise RuntimeError("only some of these samples are in memory; call subset or split before keep")


@dataclasses.dataclass(kw_only=True)
class Dataset(Options, abc.ABC):
    """Base of all data sets.

    On the command line, a subclass has the name of its file, unless the class statement gives another name.

    Attributes:
        task: what a network learns on this data set.
        keeps_samples: True if a rank must not copy only its own samples to save memory, because the component itself
            keeps all samples, or because all processes of a machine share their memory.
    """

    task: ClassVar[Task] = CLASSIFICATION
    keeps_samples: ClassVar[bool] = False

    @property
    def has_classes(self) -> bool:
        """Return True if each sample has a class as its target."""
        return self.task.metric == "test_accuracy"

    @property
    @abc.abstractmethod
    def num_classes(self) -> int:
        """Return the number of classes; a subclass may define a class variable instead."""

    @abc.abstractmethod
    def dummy_batch(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        """Return zeros [num_samples, ...] with the shape and dtype of the network's inputs."""

    def dummy_targets(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        """Return int64 zeros [num_samples, ...] with the shape of the targets of `num_samples` samples."""
        return torch.zeros(num_samples, dtype=torch.int64, device=device)

    def augment(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Augment a batch of training inputs at random and return it; without augmentation, return it unchanged.

        Args:
            inputs: a batch as stored in `Samples`; this method does not change it.
            generator: random generator on the CPU.
        """
        return inputs

    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        """Convert a batch of stored or augmented inputs into the network's inputs, and return it."""
        return inputs

    def yardsticks(self) -> dict[str, float]:
        """Return values that describe the whole test set, by column name, for comparison with a network's results."""
        return {}

    def warnings(self) -> list[str]:
        """Return notes for the user about the data, one sentence each."""
        return []

    @abc.abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Return (number of training samples, number of test samples) of the whole set."""

    def resolve_sizes(self, train_size: int | None, test_size: int | None) -> tuple[int, int]:
        """Return (number of training samples, number of test samples) that `load` would return.

        Args:
            train_size: requested number of training samples; None: all.
            test_size: requested number of test samples; None: all.

        Raises:
            DatasetError: "digits has 1347 training samples, so 5000 are not possible; ask for 1 to 1347".
        """
        whole_train, whole_test = self.sizes()
        return (
            self._resolve_size("training", train_size, whole_train),
            self._resolve_size("test", test_size, whole_test),
        )

    def _resolve_size(self, part: str, wanted: int | None, whole: int) -> int:
        size = whole if wanted is None else wanted
        if not 1 <= size <= whole:
            raise DatasetError(
                f"{self.component_name} has {whole} {part} samples, so {size} are not possible; ask for 1 to {whole}"
            )
        return size

    def status(self, data_dir: Path) -> str:
        """Return one line for `bench data` and `bench doctor` that says whether the set is ready to be loaded."""
        return "built in, nothing to prepare"

    def is_present(self, data_dir: Path) -> bool:
        """Return True if the set can be loaded without network access."""
        return True

    def prepare(self, data_dir: Path) -> None:
        """Download and verify the files that `load` needs; built-in data sets need none.

        Raises:
            DatasetError: the preparation failed; the message is one sentence that says why and what to do.
        """

    @abc.abstractmethod
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Samples, Samples]:
        """Load the data set, without network access, and return (training set, test set).

        Args:
            data_dir: folder into which `prepare` has written.
            seed: the run's seed, for generated samples; other data sets ignore it.
            train_size: number of training samples, chosen so that each class keeps its share; None: all.
            test_size: number of test samples, chosen in the same way; None: all.

        Raises:
            DatasetError: the set is missing or damaged, or has fewer samples than requested.
        """


@dataclasses.dataclass(kw_only=True)
class ImageDataset(Dataset, abc.ABC):
    """Base of data sets of square colour images with labels, stored as uint8 pixels.

    Attributes:
        mean: mean of each channel over pixel values scaled to [0, 1], for normalisation.
        std: standard deviation of each channel, on the same scale.
        mirror: True if augmentation may flip images, because a mirrored image keeps its label (true for photographs,
            but not for digits).
    """

    mean: ClassVar[tuple[float, float, float]]
    std: ClassVar[tuple[float, float, float]]
    mirror: ClassVar[bool]

    @property
    def image_size(self) -> int:
        """Return the side of an image in pixels."""
        return IMAGE_SIZE

    @override
    def dummy_batch(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(num_samples, 3, self.image_size, self.image_size, device=device)

    @override
    def augment(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return crop_and_flip(inputs, generator, flip=self.mirror)

    @override
    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        return normalise(inputs, self.mean, self.std)


_PAD_MODES = {"zero": "constant", "reflect": "reflect"}


def crop_and_flip(
    images: torch.Tensor,
    generator: torch.Generator,
    *,
    flip: bool,
    padding: int = 4,
    border: Literal["zero", "reflect"] = "zero",
) -> torch.Tensor:
    """Shift each image at random by up to `padding` pixels per direction, and with `flip` mirror half of the images.

    Args:
        images: any dtype [num_samples, channels, height, width]; not changed.
        generator: random generator on the CPU; advanced by 2 draws per image (3 with `flip`).
        flip: mirror each image left to right with probability 1/2.
        padding: largest shift in pixels; each of the (2 padding + 1)^2 shifts is equally likely.
        border: content of the padding: "zero" for black, "reflect" for the image reflected at its edge.

    Returns:
        A new tensor of the same shape, dtype and device.
    """
    num_samples, channels, height, width = images.shape
    num_shifts = 2 * padding + 1
    top = torch.randint(num_shifts, (num_samples, 1), generator=generator)
    left = torch.randint(num_shifts, (num_samples, 1), generator=generator)
    rows = top + torch.arange(height)  # [num_samples, height], positions in the padded image
    columns = left + torch.arange(width)
    if flip:
        mirrored = torch.randint(2, (num_samples, 1), generator=generator, dtype=torch.bool)
        columns = torch.where(mirrored, columns.flip(1), columns)
    pixels = rows.unsqueeze(2) * (width + 2 * padding) + columns.unsqueeze(1)
    padded = functional.pad(images, (padding, padding, padding, padding), mode=_PAD_MODES[border])
    index = pixels.view(num_samples, 1, height * width).expand(-1, channels, -1).to(images.device)
    return padded.flatten(2).gather(2, index).view(images.shape)


def normalise(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Return (pixel / 255 - mean) / std for every pixel, with the mean and std of its channel.

    Args:
        images: uint8 [num_samples, channels, height, width], not changed.
        mean: mean of each channel, over pixel values scaled to [0, 1].
        std: standard deviation of each channel, on the same scale.

    Returns:
        A new float32 tensor of the same shape, on the same device.
    """
    offset, scale = (torch.tensor(values, device=images.device).view(-1, 1, 1) * 255 for values in (mean, std))
    return images.to(torch.float32, copy=True).sub_(offset).div_(scale)
