"""Data that a user's function returns: `--dataset path/data.py:load`."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset
from typing_extensions import Doc, override

from bench.core import functions
from bench.core.config.run import RunConfig
from bench.core.errors import PluginError
from bench.datasets.base import Dataset, LazyInputs, Samples, crop_and_flip


@dataclasses.dataclass(kw_only=True, eq=False)
class FunctionDataset(functions.FunctionOptions, Dataset):
    """Calls a user's function that returns (training set, test set).

    Each set is a map-style torch `Dataset` of (input, label), or a pair of tensors or arrays (inputs, labels). Inputs
    have any shape; labels count from 0. Inputs of a `Dataset` are read when a batch needs them; labels are read before
    training.
    """

    keeps_samples: ClassVar[bool] = True  # so that the function is called once

    crop_and_flip: Annotated[bool, Doc("with --augment, crop and flip images at random: float or uint8 [3, h, w]")] = (
        False
    )

    @property
    @override
    def num_classes(self) -> int:
        return max(int(part.targets.max()) for part in self._loaded().parts) + 1

    @override
    def dummy_batch(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        loaded = self._loaded()
        return torch.zeros(num_samples, *loaded.shape, dtype=loaded.dtype, device=device)

    @override
    def augment(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return crop_and_flip(inputs, generator, flip=True) if self.crop_and_flip else inputs

    @override
    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return floating-point inputs as float32, pixels (uint8) scaled to [0, 1], and other integers unchanged."""
        if inputs.dtype == torch.uint8:
            return inputs.to(torch.float32) / 255
        return inputs.to(torch.float32) if inputs.is_floating_point() else inputs

    @override
    def sizes(self) -> tuple[int, int]:
        train, test = self._loaded().parts
        return len(train), len(test)

    @override
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Samples, Samples]:
        train, test = self._loaded(seed).parts
        train_size, test_size = self.resolve_sizes(train_size, test_size)
        return train.subset(train_size), test.subset(test_size)

    @override
    def warnings(self) -> list[str]:
        if self.num_classes == 1:
            return [f"{self.component_name} gives every sample the label 0, so there is nothing to learn"]
        absent = set(range(self.num_classes)) - set(self._loaded().parts[0].targets.unique().tolist())
        if not absent:
            return []
        return [
            f"the training set of {self.component_name} has no sample of {len(absent)} of its {self.num_classes} "
            f"classes, such as {min(absent)}; labels should number the classes from 0"
        ]

    @override
    def status(self, data_dir: Path) -> str:
        return f"loaded by {self.function.path}"

    def _loaded(self, seed: int | None = None) -> Loaded:
        """Return the data for a seed; None: for any seed, because only the classes and the input shape are needed."""
        key = (type(self), tuple(self.option_texts().items()))
        kept = _kept.get(key)
        if seed is None:
            seed = kept.seed if kept else RunConfig.seed
        if kept is not None and kept.draws and kept.seed != seed:
            kept = None
        if kept is None or not (kept.process == os.getpid() or kept.is_in_memory):
            # A forked process must not share open files with other processes.
            _kept.clear()
            _kept[key] = kept = _load(self, seed, [part.targets for part in kept.parts] if kept else [None, None])
        return kept


COMPONENT = FunctionDataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """The data that a user's function has returned.

    Attributes:
        parts: training set and test set.
        shape, dtype: shape and dtype of one input, as the network gets it.
        seed: the seed of numpy's and Python's random generators when the function was called.
        draws: True if the function drew from these generators, so that another seed gives other data.
        process: the id of the process that called the function.
    """

    parts: tuple[Samples, Samples]
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    draws: bool
    process: int

    @property
    def is_in_memory(self) -> bool:
        """Return True if all inputs are in memory."""
        return all(isinstance(part.inputs, torch.Tensor) for part in self.parts)


_MOST_CLASSES = 100_000  # a network for more would fill the memory; a larger set of samples may have more
_kept: dict[tuple[type[FunctionDataset], tuple[tuple[str, str], ...]], Loaded] = {}  # at most one


def _load(dataset: FunctionDataset, seed: int, labels: list[torch.Tensor | None]) -> Loaded:
    """Call the function, and check what it returns.

    Args:
        dataset: the component.
        seed: seed for numpy's and Python's random generators.
        labels: the labels of each part; None for a part whose labels no other process has read yet.

    Raises:
        PluginError: the function raised an exception, or returned something else; the message is one sentence.
    """
    function = dataset.function
    with _seeded(seed), torch.device("cpu"):
        before = functions.generator_states()
        returned = dataset.call()
        draws = functions.generator_states() != before
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise PluginError(
                f"{function.name} must return (training set, test set), and returned {functions.described(returned)}"
            )
        if all(isinstance(part, (torch.Tensor, np.ndarray)) for part in returned):
            raise PluginError(
                f"{function.name} must return (training set, test set), and returned one pair of arrays, "
                f"{functions.described(returned)}; return (train_inputs, train_labels), (test_inputs, test_labels)"
            )
        train, test = (
            _samples(part, function, f"{function.name}: the {kind} set", known)
            for part, kind, known in zip(returned, ("training", "test"), labels, strict=True)
        )
        examples = [dataset.normalise(part.inputs[:1])[0] for part in (train, test)]
    shape, dtype = tuple(examples[0].shape), examples[0].dtype
    if shape != tuple(examples[1].shape):
        raise PluginError(
            f"{function.name}: training inputs have the shape {shape} and test inputs {tuple(examples[1].shape)}"
        )
    if dtype != examples[1].dtype:
        raise PluginError(f"{function.name}: training inputs are {dtype} and test inputs {examples[1].dtype}")
    highest = max(int(part.targets.max()) for part in (train, test))
    if highest >= max(_MOST_CLASSES, len(train) + len(test)):
        raise PluginError(
            f"{function.name} needs labels that number the classes from 0, and has the label {highest} in "
            f"{len(train) + len(test)} samples"
        )
    if dataset.crop_and_flip and len(shape) != 3:
        raise PluginError(
            f"{function.name}: crop_and_flip=true needs images [3, height, width], and inputs are {shape}"
        )
    return Loaded(parts=(train, test), shape=shape, dtype=dtype, seed=seed, draws=draws, process=os.getpid())


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global random generators inside a `with` block, so that a random split is the same in every process."""
    with torch.random.fork_rng(devices=[]), functions.seeded_generators(seed):
        torch.manual_seed(0)
        yield


def _samples(part: Any, function: functions.Function, what: str, known: torch.Tensor | None) -> Samples:
    """Return what the user's function returned for one part as `Samples`.

    Args:
        part: a data set, or a pair of arrays.
        function: the user's function.
        what: the name of the part in messages.
        known: the labels of the part; None if they have not been read yet.
    """
    # Only for `TensorDataset` itself, because a subclass may return other items than its tensors.
    pair = part.tensors if type(part) is TensorDataset and len(part.tensors) == 2 else part
    inputs: torch.Tensor | DatasetInputs
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(hasattr(each, "shape") for each in pair):
        inputs, targets = _tensor(pair[0], f"{what} has inputs"), _tensor(pair[1], f"{what} has labels")
        if targets.dim() != 1 or not _is_whole(targets):
            raise PluginError(
                f"{what} needs labels that are whole numbers from 0, one for each input, and has "
                f"{functions.described(targets)}"
            )
        if not inputs.dim() or len(inputs) != len(targets):
            count = len(inputs) if inputs.dim() else 0
            raise PluginError(f"{what} has {count} inputs and {len(targets)} labels; give one label for each input")
        for start in range(0, len(inputs), _CHECKED_TOGETHER):
            _check_finite(inputs[start : start + _CHECKED_TOGETHER], what, start)
    elif _has_items(part):
        try:
            count = len(part)
        except (Exception, SystemExit) as error:
            raise function.failure(error) from error
        inputs = DatasetInputs(part, torch.arange(count), function, what)
        targets = inputs.labels() if known is None else known
        inputs.targets = targets
    else:
        raise PluginError(
            f"{what} must be a torch Dataset or a pair of tensors, and is {functions.described(part)}; return "
            "(inputs, labels), or a Dataset with a length whose items are (input, label)"
        )
    if len(inputs) != len(targets):
        raise PluginError(
            f"{what} has {len(inputs)} items now and had {len(targets)} before; return the same data in each call"
        )
    targets = targets.to(torch.int64)
    if not len(targets):
        raise PluginError(f"{what} is empty; give it at least one sample")
    if (lowest := int(targets.min())) < 0:
        raise PluginError(f"{what} needs labels that are whole numbers from 0, and has the label {lowest}")
    return Samples(inputs=inputs, targets=targets)


def _has_items(part: Any) -> bool:
    others = (str, bytes, dict, list, tuple, torch.Tensor, np.ndarray, IterableDataset)
    return hasattr(part, "__getitem__") and hasattr(part, "__len__") and not isinstance(part, others)


def _tensor(value: Any, what: str) -> torch.Tensor:
    try:
        if hasattr(value, "shape") and not isinstance(value, torch.Tensor):
            # Also accepts arrays of other libraries. Copies memory that is read-only (tables of pandas) or reversed
            # (mirrored).
            value = np.require(value, requirements=["C", "W"])
        return torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError):
        raise PluginError(
            f"{what} of type {functions.described(value)}; give a tensor, or an array of numbers"
        ) from None


def _check_finite(inputs: torch.Tensor, what: str, first: int) -> None:
    """Raise PluginError if inputs [n, ...], the first of which is number `first`, hold NaN or infinite values."""
    if not (finite := torch.isfinite(inputs.to(torch.float32) if inputs.is_floating_point() else inputs)).all():
        index = first + int(finite.reshape(len(finite), -1).all(1).logical_not().nonzero()[0])
        raise PluginError(
            f"{what} has NaN, or a value that is infinite in fp32, in the input of sample {index}; repair this sample "
            "or leave it out"
        )


def _is_whole(labels: torch.Tensor) -> bool:
    return not (labels.is_floating_point() or labels.is_complex())


_CHECKED_TOGETHER = 256  # samples in memory, so that a check needs little memory of its own


class DatasetInputs(LazyInputs):
    """The inputs of a map-style torch `Dataset`, which are read when they are used.

    Args:
        dataset: the data set, whose items are (input, label).
        indices: int64 indices of the samples.
        function: the function that returned the data set, for error messages.
        what: the name of the data set in error messages.

    Attributes:
        targets: the labels of all items of the data set; an item that is read later must have the same label again.
    """

    targets: torch.Tensor

    def __init__(self, dataset: Any, indices: torch.Tensor, function: functions.Function, what: str) -> None:
        self._dataset = dataset
        self._indices = indices
        self._function = function
        self._what = what

    @override
    def __len__(self) -> int:
        return len(self._indices)

    @override
    def __getitem__(self, chosen: torch.Tensor | slice) -> torch.Tensor:
        chosen = chosen.cpu() if isinstance(chosen, torch.Tensor) else chosen
        indices = self._indices[chosen].tolist()
        batch = torch.empty(0)
        for place, index in enumerate(indices):
            item, label = self._item(index)
            if label != self.targets[index]:
                raise PluginError(
                    f"{self._what} has the label {label} in item {index}, which had {int(self.targets[index])} before; "
                    "return the same labels each time"
                )
            if not place:
                batch = item.new_empty(len(indices), *item.shape)
            self._check_shape(item, batch.shape[1:], index)
            batch = batch.to(torch.promote_types(batch.dtype, item.dtype))
            batch[place] = item  # a copy, because the next item may be written to the same memory
        return batch

    @override
    def select(self, indices: torch.Tensor) -> DatasetInputs:
        selected = DatasetInputs(self._dataset, self._indices[indices], self._function, self._what)
        selected.targets = self.targets
        return selected

    def labels(self) -> torch.Tensor:
        """Return the label of each item, from the data set's own list if it is of a known class.

        Otherwise all items are read, and their inputs are checked, so that a bad one is found before training.
        """
        known = _labels(self._dataset)
        if known is not None and known.dim() == 1 and _is_whole(known):
            return known
        found, shape = [], None
        for index in self._indices.tolist():
            item, label = self._item(index)
            shape = item.shape if shape is None else shape
            self._check_shape(item, shape, index)
            _check_finite(item[None], self._what, index)
            found.append(label)
        return torch.tensor(found, dtype=torch.int64)

    def _check_shape(self, item: torch.Tensor, shape: torch.Size, index: int) -> None:
        if item.shape != shape:
            raise PluginError(
                f"{self._what} must have inputs of one shape, and has {tuple(shape)} and, in item {index}, "
                f"{tuple(item.shape)}"
            )

    def _item(self, index: int) -> tuple[torch.Tensor, int]:
        try:
            item = self._dataset[index]
        except (Exception, SystemExit) as error:
            raise self._function.failure(error) from error
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise PluginError(
                f"{self._what} must have items (input, label), and item {index} is {functions.described(item)}"
            )
        try:
            label = operator.index(item[1])
        except TypeError:
            raise PluginError(
                f"{self._what} needs labels that are whole numbers from 0, and item {index} has "
                f"{functions.described(item[1])}"
            ) from None
        return _tensor(item[0], f"{self._what} has an input in item {index}"), label


def _labels(dataset: Any) -> torch.Tensor | None:
    """Return the stored labels of a data set of a known class; None if only its items contain the labels.

    A subclass of a known class does not count, because its items may differ from its attributes.
    """
    kind = type(dataset)
    if kind is TensorDataset:
        return dataset.tensors[1] if len(dataset.tensors) == 2 else None
    if kind is Subset:
        labels = _labels(dataset.dataset)
        return None if labels is None else labels[torch.as_tensor(dataset.indices, dtype=torch.int64)]
    if kind is ConcatDataset:
        parts = [_labels(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else torch.cat([part for part in parts if part is not None])
    vision = sys.modules.get("torchvision.datasets")  # imported if the data set is torchvision's
    if vision is None or getattr(dataset, "target_transform", None) is not None:
        return None
    if kind in (vision.DatasetFolder, vision.ImageFolder):
        return torch.as_tensor([label for _, label in dataset.samples])
    if kind in (vision.CIFAR10, vision.CIFAR100, vision.FashionMNIST, vision.KMNIST, vision.MNIST):
        return torch.as_tensor(dataset.targets)[: len(dataset)]
    return None
