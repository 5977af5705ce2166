"""Data and a network that functions of a file return, as users give their own."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset


class Items(Dataset[tuple[torch.Tensor, int]]):
    """Pairs of a vector and a label that are made one by one."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], int(self.labels[index])


def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return 8x8 digits as a training and a test set of tensors.

    The test set has 20 noisy copies of each of its digits, so that its accuracy shows small changes of the weights.
    """
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    copies = inputs[1300:].repeat(20, 1)
    noise = torch.from_numpy(np.random.RandomState(1).uniform(0, 2, copies.shape)).float()
    return (inputs[:1300], targets[:1300]), (copies * noise, targets[1300:].repeat(20))


def items() -> tuple[Items, Items]:
    """Return the same sets as objects that are read item by item."""
    train, test = digits()
    return Items(*train), Items(*test)


def network(num_classes: int, hidden: int = 32) -> nn.Module:
    """Return a network of two layers for them."""
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
