"""Data sets of a user's function: a network gets the items that this code returns, or one sentence says why not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.core import functions, spec
from bench.core.errors import UsageError

DATA = """
import random

import numpy as np
import pandas as pd
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import MNIST

X, Y = torch.arange(24.0).view(12, 2), torch.arange(12) % 3
BUFFER = np.zeros(2)


class Zeros(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] * 0, int(self.tensors[1][index])


class Windows(TensorDataset):
    def __len__(self):
        return len(self.tensors[0]) - 2

    def __getitem__(self, index):
        return self.tensors[0][index : index + 3].flatten(), self.tensors[1][index + 2]


class Odd(Subset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 1, 1 - (y % 2)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Items(Dataset):
    def __init__(self, make, count=12):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


class Transformed(Items):
    targets = Y

    def __init__(self, target_transform):
        super().__init__(lambda i: (X[i], target_transform(int(Y[i]))))


class Digits(MNIST):
    def __init__(self, target_transform=None):
        self.data, self.targets = torch.arange(12 * 16, dtype=torch.uint8).view(12, 4, 4), Y
        self.transform, self.target_transform = lambda image: np.array(image), target_transform


def library(**changes):
    digits = Digits(**changes)
    digits.__class__ = MNIST
    return digits


SETS = {
    "plain": TensorDataset(X, Y),
    "zeros": Zeros(X, Y),
    "windows": Windows(X, Y),
    "odd": Odd(Transformed(lambda y: y), range(1, 12, 2)),
    "subset": Subset(TensorDataset(X, Y), [3, -1, 5]),
    "of_zeros": Subset(Zeros(X, Y), torch.tensor([1, 2])),
    "joined": ConcatDataset([TensorDataset(X, Y), Transformed(lambda y: 2 - y)]),
    "joined_tensors": ConcatDataset([TensorDataset(X, Y), TensorDataset(X, 2 - Y)]),
    "transformed": Transformed(lambda y: 2 - y),
    "changing": Items(lambda i: (X[i], Y[i])),
    "library": library(),
    "library_transformed": library(target_transform=lambda y: 2 - y),
    "inherited": Digits(target_transform=lambda y: 2 - y),
    "numpy": Items(lambda i: (np.full(2, i, np.float64), np.int16(i % 3))),
    "numbers": Items(lambda i: [i, i % 2]),
    "one_buffer": Items(lambda i: (np.copyto(BUFFER, i) or BUFFER, i % 3)),
    "flipped": Items(lambda i: (np.arange(2 * i, 2 * i + 2.0)[::-1], i % 3)),
    "mixed": Items(lambda i: (torch.tensor([i]) if i % 2 else np.ones(1, np.float32), torch.tensor([i % 2]))),
}


def given(name: str):
    return SETS[name], SETS[name]


def drawn():
    values = np.random.rand(8, 2)
    return [(values + random.random(), np.arange(8) % 2)] * 2


def still():
    return [(np.zeros((8, 2)), np.arange(8) % 2)] * 2


GOOD = TensorDataset(X, Y)


class Stream(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(GOOD)


def parts(*returned):
    return lambda: returned[0] if len(returned) == 1 else returned


nothing = parts(None)
named = parts({"train": GOOD, "test": GOOD})
one_set = parts(GOOD)
one_pair = parts(X, Y)
one_numpy_pair = parts(X.numpy(), Y.numpy())
flat = parts(X, Y, X, Y)
no_test = parts(GOOD, None)
dicts = parts(GOOD, Items(lambda i: {"image": X[i], "label": 1}))
inputs_only = parts(TensorDataset(X), GOOD)
weighted = parts(TensorDataset(X, Y, X), GOOD)
fractions = parts(Items(lambda i: (X[i], 0.5)), GOOD)
one_hot = parts(Items(lambda i: (X[i], torch.eye(3)[0])), GOOD)
words = parts(Items(lambda i: (X[i], "cat")), GOOD)
negative = parts(Items(lambda i: (X[i], -1)), GOOD)
texts = parts(Items(lambda i: ("abc", 1)), GOOD)
ragged = parts(Items(lambda i: (X[i][: 2 - i % 2], 1)), GOOD)
stream = parts(Stream(), GOOD)
loader = parts(torch.utils.data.DataLoader(GOOD), GOOD)
empty = parts(GOOD, Items(None, 0))
strings = parts((np.array([["a"], ["b"]]), np.arange(2)), GOOD)
whole = parts((X.long(), Y), GOOD)
columns = parts((X, Y.view(-1, 1)), GOOD)
gaps = parts((X, Y * 50), GOOD)
frame = parts(*[(pd.DataFrame(X.numpy()), pd.Series(Y.numpy()))] * 2)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "data.py"
    path.write_text(DATA, encoding="utf-8")
    return path


@pytest.fixture
def file(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(written.parent)
    return written


@pytest.mark.parametrize(
    "name",
    [
        "plain", "zeros", "windows", "odd", "subset", "of_zeros", "joined", "joined_tensors", "transformed", "library",
        "library_transformed", "inherited", "numpy", "numbers", "mixed", "one_buffer", "flipped",
    ],
)  # fmt: skip
def test_a_network_is_trained_on_the_items_that_the_users_code_returns(name: str, file: Path) -> None:
    train, test = spec.build("datasets", f"data.py:given:name={name}").load(file.parent, seed=1)
    module: Any = functions.find("data.py:given").call.__globals__
    items = [copy.deepcopy(module["SETS"][name][index]) for index in range(len(module["SETS"][name]))]
    for part in (train, test):
        inputs, targets = part.at(slice(0, len(items)))
        assert targets.tolist() == [int(label) for _, label in items]
        # torch reads no memory backwards
        values = [value.copy() if isinstance(value, np.ndarray) else value for value, _ in items]
        assert torch.equal(inputs, torch.stack(list(map(torch.as_tensor, values))))


def test_a_table_is_data_without_a_warning(file: Path, recwarn: pytest.WarningsRecorder) -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # by default, a process is warned of memory that may not be written once
    train, _ = spec.build("datasets", "data.py:frame").load(file.parent, seed=1)
    torch.set_warn_always(always)
    assert torch.equal(train.at(slice(0, 12))[0], torch.arange(24.0).view(12, 2))
    assert [str(each.message) for each in recwarn if "writable" in str(each.message)] == []


def test_a_label_that_changes_is_refused(file: Path) -> None:
    train, _ = spec.build("datasets", "data.py:given:name=changing").load(file.parent, seed=1)
    module: Any = functions.find("data.py:given").call.__globals__
    module["SETS"]["changing"].make = lambda index: (torch.zeros(2), 0)
    with pytest.raises(UsageError, match="the training set has the label 0 in item 1, which had 1 before"):
        train.at(torch.tensor([1]))


def test_what_the_function_draws_belongs_to_the_seed_and_the_global_generators_stay_as_they_are(file: Path) -> None:
    states = functions.generator_states()
    dataset = spec.build("datasets", "data.py:drawn")
    (first, _), (other, _), (again, _) = (dataset.load(file.parent, seed=seed) for seed in (1, 2, 1))
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    assert functions.generator_states() == states
    still = spec.build("datasets", "data.py:still")
    assert still.load(file.parent, seed=1)[0].inputs is still.load(file.parent, seed=2)[0].inputs  # called once


def test_classes_without_a_training_sample_are_noted(file: Path) -> None:
    assert spec.build("datasets", "data.py:given:name=plain").warnings() == []
    assert spec.build("datasets", "data.py:gaps").warnings() == [
        "the training set of data.py:gaps has no sample of 98 of its 101 classes, such as 1; labels should number the "
        "classes from 0"
    ]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", r"must return (training set, test set), and returned NoneType"),
        ("named", "and returned dict with the keys 'train', 'test'"),
        ("one_set", "and returned TensorDataset"),
        (
            "one_pair",
            "returned one pair of arrays, tuple of 2 (Tensor, Tensor); return (train_inputs, train_labels), (",
        ),
        ("one_numpy_pair", "returned one pair of arrays, tuple of 2 (ndarray, ndarray); return (train_inputs, "),
        ("flat", "and returned tuple of 4 (Tensor, Tensor, Tensor, Tensor)"),
        ("no_test", "the test set must be a torch Dataset or a pair of tensors, and is NoneType"),
        ("dicts", "the test set must have items (input, label), and item 0 is dict with the keys 'image', 'label'"),
        ("inputs_only", "the training set must have items (input, label), and item 0 is tuple of 1 (Tensor)"),
        ("weighted", "must have items (input, label), and item 0 is tuple of 3 (Tensor, Tensor, Tensor)"),
        ("fractions", "needs labels that are whole numbers from 0, and item 0 has float 0.5"),
        (
            "one_hot",
            "needs labels that are whole numbers from 0, and item 0 has Tensor of torch.float32 and shape (3,)",
        ),
        ("words", "needs labels that are whole numbers from 0, and item 0 has str 'cat'"),
        ("negative", "needs labels that are whole numbers from 0, and has the label -1"),
        ("texts", "the training set has an input in item 0 of type str 'abc'; give a tensor, or an array of numbers"),
        ("ragged", "the training set must have inputs of one shape, and has (2,) and, in item 1, (1,)"),
        ("stream", "the training set must be a torch Dataset or a pair of tensors, and is Stream; return (inputs,"),
        ("loader", "and is DataLoader; return (inputs, labels), or a Dataset with a length whose items are (input,"),
        ("empty", "the test set is empty"),
        ("strings", "the training set has inputs of type ndarray of <U1 and shape (2, 1); give a tensor"),
        ("whole", "training inputs are torch.int64 and test inputs torch.float32"),
        ("columns", "whole numbers from 0, one for each input, and has Tensor of torch.int64 and shape (12, 1)"),
    ],
)
def test_a_wrong_return_is_named_with_what_is_wanted(name: str, sentence: str, file: Path) -> None:
    with pytest.raises(UsageError) as refused:
        spec.build("datasets", f"data.py:{name}").sizes()
    assert str(refused.value).startswith(f"data.py:{name}")
    assert sentence in str(refused.value)
