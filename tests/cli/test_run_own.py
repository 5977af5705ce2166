"""Runs of a user's model and data that draw from numpy and Python: each seed repeats, and each rank draws its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.invoke import execute, only_run, rows

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
RUN = (
    "run", "--model", "own.py:build", "--dataset", "own.py:load", "--batch-size", "8", "--steps", "12",
    "--eval-every", "6", "--checkpoint-every", "4", "--world-size", "2", "--compressor", "topk",
)  # fmt: skip


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
