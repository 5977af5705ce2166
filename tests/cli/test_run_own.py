"""Runs of a user's model and data that draw from numpy and Python: each seed repeats, and each rank draws its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.invoke import execute, invoke, only_run, rows

pytestmark = pytest.mark.timeout(600)

FILE = """
import os
import pathlib
import random

import numpy as np
import torch
from torch import nn

STARTED = np.random.rand()


class Items(torch.utils.data.Dataset):
    def __init__(self, count):
        self.labels = np.random.randint(3, size=count)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        noise = np.random.rand(8) + random.random()
        return noise + self.labels[index] + STARTED, self.labels[index]


def load():
    return Items(96), Items(32)


class Net(nn.Sequential):
    steps = 0

    def forward(self, x):
        if self.training and "RANK" in os.environ:
            value = np.random.rand()
            with open(os.environ["DRAWN"], "a") as file:
                file.write(f"{value} {random.random()}\\n")
            x = x + value
            self.steps += 1
            lost = pathlib.Path(os.environ["LOST"])
            if self.steps == 11 and os.environ["RANK"] == "1" and not lost.exists():
                lost.touch()
                os._exit(1)
        return super().forward(x)


def build(num_classes):
    network = Net(nn.Linear(8, 6), nn.ReLU(), nn.LazyLinear(num_classes))
    with torch.no_grad():
        network[0].weight += torch.tensor(np.random.rand(6, 8)) + random.random()
    return network
"""
CLOCK = """
import numpy as np
import torch
from torch import nn


def load():
    return [(torch.zeros(64, 8), torch.arange(64) % 3)] * 2


def build(num_classes):
    network = nn.Linear(8, num_classes)
    network.register_buffer("shift", torch.tensor(np.random.default_rng().random(3)))
    return network
"""
WRONG = """
import torch
from torch import nn
from torch.utils.data import Dataset

X, Y = torch.rand(64, 2), torch.arange(64) % 3
GOOD = X, Y


class Items(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return X[index] / (index != 5), index % 3


class Net(nn.Linear):
    def __init__(self, change, inputs=2, outputs=3):
        super().__init__(inputs, outputs)
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


def parts(*returned):
    return lambda: returned[0] if len(returned) == 1 else returned


def network(change, **sizes):
    return lambda num_classes: Net(change, **sizes)


def fails():
    raise ValueError("no such width")


load, build = parts(GOOD, GOOD), network(nn.Identity())
nothing, three, empty = parts(None), parts(GOOD, GOOD, GOOD), parts((X[:0], Y[:0]), GOOD)
wide, whole, few = parts(*[(X[:, :1], Y)] * 2), parts(*[(X.long(), Y)] * 2), parts((X, Y[:60]), GOOD)
fractions, negative, beyond = (parts((X, labels), (X, labels)) for labels in (Y / 2, Y - 1, Y * 10**9))
nan, nan_items = parts(GOOD, (X.where(X < X.max(), torch.nan), Y)), parts(Items(), GOOD)
narrow, pair = network(nn.Identity(), outputs=2), network(lambda y: (y, y))
scalar, detached = network(torch.sum), network(torch.detach)
"""
LOGITS = "logits; return a value for each of the 3 classes of own.py:load (labels 0 to 2)"
RUN = (
    "run", "--model", "own.py:build", "--dataset", "own.py:load", "--batch-size", "8", "--steps", "12",
    "--eval-every", "6", "--checkpoint-every", "4", "--world-size", "2", "--compressor", "topk",
)  # fmt: skip


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    ("option", "function", "sentence"),
    [
        ("dataset", "nothing", "{} must return (training set, test set), and returned NoneType"),
        ("dataset", "three", "{} must return (training set, test set), and returned tuple of 3 (tuple, tuple, tuple)"),
        ("dataset", "empty", "{}: the training set is empty; give it at least one sample"),
        ("dataset", "few", "{}: the training set has 64 inputs and 60 labels; give one label for each input"),
        ("dataset", "fractions", "{}: the training set needs labels that are whole numbers from 0, one for each input"),
        (
            "dataset",
            "negative",
            "{}: the training set needs labels that are whole numbers from 0, and has the label ",
        ),
        ("dataset", "beyond", "{} needs labels that number the classes from 0, and has the label 2000000000"),
        ("dataset", "nan", "{}: the test set has NaN, or a value that is infinite in fp32, in the input of sample "),
        ("dataset", "nan_items", "{}: the training set has NaN, or a value that is infinite in fp32, in the input of "),
        ("dataset", "wide", "own.py:build cannot take inputs of 1 (mat1 and mat2 shapes cannot be multiplied (2x1 and"),
        ("dataset", "whole", "return inputs in float32, or pixels in uint8, from {}, or change own.py:build"),
        ("dataset", "fails", "{} cannot be used: line 36: ValueError: no such width"),
        ("dataset", "laod", "own.py has no function 'laod' (did you mean 'load'?); choose one of Items, Net, parts, "),
        ("model", "own:build", "there is no model 'own'; a function in your own file is named own.py:build"),
        ("model", "narrow", "{} returns 2x2 for 2 samples instead of 2x3 " + LOGITS),
        ("model", "pair", "{} returns tuple instead of a tensor of " + LOGITS),
        ("model", "scalar", "{} returns a single number for 2 samples instead of 2x3 " + LOGITS),
        ("model", "detached", "{} returns logits that have no gradient; leave out detach, no_grad and the like"),
        ("model", "nothing", "{} must return a torch.nn.Module, and returned NoneType"),
        ("model", "fails", "{} cannot be used: line 36: ValueError: no such width"),
    ],
)
def test_what_a_users_function_gives_wrong_is_one_sentence_that_names_it_before_the_run(
    option: str, function: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(WRONG, encoding="utf-8")
    name = function if ":" in function else f"own.py:{function}"
    own = {"model": "own.py:build", "dataset": "own.py:load"} | {option: name}
    answer = invoke("run", "--model", own["model"], "--dataset", own["dataset"], "--steps", "2", "--out", "out")
    assert answer.code == 2
    assert sentence.format(name) in answer.error
    assert "\n" not in answer.error
    assert not (tmp_path / "out").exists()


def losses(folder: Path) -> list[tuple[str, str]]:
    return [(row["train_loss"], row["test_loss"]) for row in rows(folder)]


def test_a_seed_of_several_repeats_alone_and_after_a_loss_and_no_two_ranks_draw_the_same(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "never").touch()
    whole = {"DRAWN": str(tmp_path / "drawn"), "LOST": str(tmp_path / "never")}
    together = execute(*RUN, "--seeds", "1,2", "--out", "together", cwd=tmp_path, **whole)
    assert together.code == 0, together.error
    first, second = sorted((tmp_path / "together").iterdir(), key=lambda folder: rows(folder)[0]["seed"])
    drawn = [line.split() for line in (tmp_path / "drawn").read_text().splitlines()]
    assert len(drawn) == 2 * 2 * 12
    assert all(len(set(values)) == len(drawn) for values in zip(*drawn, strict=True))
    assert losses(first) != losses(second)

    told = {"DRAWN": str(tmp_path / "other"), "LOST": str(tmp_path / "lost")}
    lost = execute(*RUN, "--seed", "2", "--out", "alone", cwd=tmp_path, **told)
    assert lost.code == 3, lost.error
    alone = only_run(tmp_path / "alone")
    resumed = execute("run", "--resume", str(alone), cwd=tmp_path, **told)
    assert resumed.code == 0, resumed.error
    assert losses(alone) == losses(second)


def test_weights_that_no_seed_gives_are_said_to_be_the_functions_fault(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CLOCK, encoding="utf-8")
    answer = execute(*RUN, cwd=tmp_path)
    assert answer.code == 3
    assert "ranks drew different initial weights from one seed; own.py:build must draw from torch, " in answer.error
    assert "torch version" not in answer.error
