"""Data that a function of the user's own returns: `--dataset path/data.py:load`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Subset
from typing_extensions import Doc, override

from bench.core import functions
from bench.core.registry import PluginError
from bench.datasets.base import Dataset, LazyInputs, Samples, crop_and_flip


@dataclasses.dataclass(kw_only=True, eq=False)
class FunctionDataset(functions.FunctionOptions, Dataset):
    """Calls a function that returns (training set, test set).

    Each is a map-style torch `Dataset` of (input, label), or a pair of tensors or arrays (inputs, labels). Inputs have
    any shape; labels count from 0. A `Dataset` is read when a batch needs it; only its labels are read before, from its
    attribute `targets` if it has one.
    """

    keeps_samples: ClassVar[bool] = True  # so that the function is called once

    crop_and_flip: Annotated[bool, Doc("with --augment, crop and flip images at random: float or uint8 [3, h, w]")] = (
        False
    )

    @property
    @override
    def num_classes(self) -> int:
        return max(int(part.targets.max()) for part in self._parts()) + 1

    @override
    def dummy_batch(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        first = self.normalise(self._parts()[0].inputs[:1])
        return torch.zeros(num_samples, *first.shape[1:], dtype=first.dtype, device=device)

    @override
    def augment(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return crop_and_flip(inputs, generator, flip=True) if self.crop_and_flip else inputs

    @override
    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return floating-point inputs as float32, pixels (uint8) from 0 to 1, and other integers unchanged."""
        if inputs.dtype == torch.uint8:
            return inputs.to(torch.float32) / 255
        return inputs.to(torch.float32) if inputs.is_floating_point() else inputs

    @override
    def sizes(self) -> tuple[int, int]:
        train, test = self._parts()
        return len(train), len(test)

    @override
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Samples, Samples]:
        train_size, test_size = self.resolve_sizes(train_size, test_size)
        train, test = self._parts()
        return train.subset(train_size), test.subset(test_size)

    @override
    def status(self, data_dir: Path) -> str:
        return f"loaded by {self.function.path}"

    def _parts(self) -> tuple[Samples, Samples]:
        train, test, process = _loaded(type(self), tuple(self.option_texts().items()))
        if process != os.getpid() and not all(isinstance(part.inputs, torch.Tensor) for part in (train, test)):
            _loaded.cache_clear()  # a forked process must not share open files with others
            train, test, _ = _loaded(type(self), tuple(self.option_texts().items()))
        return train, test


def component_of(name: str) -> type[FunctionDataset]:
    """Return the component that calls the function with this name, such as ``path/data.py:load``.

    Raises:
        UsageError: there is no such function, or it cannot be used.
    """
    _ = torch.__version__  # raises where a placeholder stands for torch: there, users' files are not imported
    return _component_of(functions.find(name))


@functools.cache  # one class per function, so that `_loaded` keeps its result
def _component_of(function: functions.Function) -> type[FunctionDataset]:
    return functions.options_from_signature(FunctionDataset, function)


@functools.lru_cache(maxsize=1)
def _loaded(component: type[FunctionDataset], options: tuple[tuple[str, str], ...]) -> tuple[Samples, Samples, int]:
    """Call the function; return its training set and test set, after checking them, and this process's id.

    Raises:
        PluginError: the function raised an exception, or returned something else; the message is one sentence.
    """
    dataset = component.from_text(dict(options))
    function = component.function
    with _seeded(), torch.device("cpu"):
        returned = dataset.call()
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise PluginError(
                f"{function.name} must return (training set, test set), and returned {_described(returned)}"
            )
        try:
            train, test = (
                _samples(part, function, f"{function.name}: the {kind} set")
                for part, kind in zip(returned, ("training", "test"), strict=True)
            )
            shapes = [tuple(part.inputs[:1].shape[1:]) for part in (train, test)]
        except PluginError:
            raise
        except (Exception, SystemExit) as error:
            raise function.failure(error) from error
    if shapes[0] != shapes[1]:
        raise PluginError(f"{function.name}: training inputs have the shape {shapes[0]} and test inputs {shapes[1]}")
    if dataset.crop_and_flip and len(shapes[0]) != 3:
        raise PluginError(
            f"{function.name}: crop_and_flip=true needs images [3, height, width], and inputs are {shapes[0]}"
        )
    return train, test, os.getpid()


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seed the global random generators inside the block, so that a random split is the same in every process."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        yield
    random.setstate(python)
    np.random.set_state(arrays)


def _samples(part: Any, function: functions.Function, what: str) -> Samples:
    """Return what the user's function returned for one part as `Samples`."""
    tensors = getattr(part, "tensors", part)  # those of a TensorDataset
    inputs: torch.Tensor | DatasetInputs
    if isinstance(tensors, (tuple, list)) and len(tensors) == 2 and all(hasattr(each, "shape") for each in tensors):
        inputs, targets = (torch.as_tensor(each) for each in tensors)
    elif hasattr(part, "__getitem__") and hasattr(part, "__len__") and not isinstance(part, (str, dict, list, tuple)):
        inputs, targets = DatasetInputs(part, torch.arange(len(part)), function), _labels(part)
        if len(targets) == len(part) and int(part[0][1]) != int(targets[0]):
            raise PluginError(
                f"{what} has label {int(part[0][1])} in its first item and {int(targets[0])} in its attribute targets; "
                "make them equal"
            )
    else:
        raise PluginError(f"{what} must be a torch Dataset or a pair of tensors, and is {_described(part)}")
    if len(inputs) != len(targets) or not len(inputs):
        raise PluginError(f"{what} has {len(inputs)} inputs and {len(targets)} labels; give one label for each input")
    if targets.dim() != 1 or targets.is_floating_point() or int(targets.min()) < 0:
        raise PluginError(f"{what} needs labels that are whole numbers from 0, one for each input")
    return Samples(inputs=inputs, targets=targets.to(torch.int64))


def _labels(dataset: Any) -> torch.Tensor:
    """Return the labels of a `Dataset`: its attribute `targets`, else the second value of each item."""
    if isinstance(dataset, Subset) and hasattr(dataset.dataset, "targets"):
        return _labels(dataset.dataset)[torch.as_tensor(dataset.indices)]
    if hasattr(dataset, "targets"):
        return torch.as_tensor(dataset.targets)
    return torch.as_tensor([int(dataset[index][1]) for index in range(len(dataset))])


class DatasetInputs(LazyInputs):
    """The inputs of a map-style torch `Dataset`, read when they are used.

    Args:
        dataset: the data set, whose items are (input, label).
        indices: int64 indices of the samples.
        function: the function that returned the data set, for error messages.
    """

    def __init__(self, dataset: Any, indices: torch.Tensor, function: functions.Function) -> None:
        self._dataset = dataset
        self._indices = indices
        self._function = function

    @override
    def __len__(self) -> int:
        return len(self._indices)

    @override
    def __getitem__(self, chosen: torch.Tensor | slice) -> torch.Tensor:
        chosen = chosen.cpu() if isinstance(chosen, torch.Tensor) else chosen
        try:
            return torch.stack([torch.as_tensor(self._dataset[i][0]) for i in self._indices[chosen].tolist()])
        except (Exception, SystemExit) as error:
            raise self._function.failure(error) from error

    @override
    def select(self, indices: torch.Tensor) -> DatasetInputs:
        return DatasetInputs(self._dataset, self._indices[indices], self._function)


def _described(value: object) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
