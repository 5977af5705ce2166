"""Flops and bytes of operations, against closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.core.errors import UsageError
from bench.extensions.place.assignment import trace
from bench.extensions.place.step import Operation, operations_of

BATCH = 4


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.same = nn.Identity()
        self.fc = nn.Linear(8 * 32 * 32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.same(torch.relu(self.norm(self.conv(x))))
        return self.fc(hidden.flatten(1))


def operations() -> dict[str, Operation]:
    with torch.device("meta"):
        traced = trace(Small())
        return {each.name: each for each in operations_of(traced, torch.empty(BATCH, 3, 32, 32))}


def test_a_convolution() -> None:
    found = operations()["conv"]
    weight, image = 4 * 8 * 3 * 9, 4 * 32 * 32
    assert (found.work, found.inputs) == ("convolution", ("x",))
    assert found.flops == 2 * BATCH * 8 * 32 * 32 * 3 * 9
    assert found.nbytes == weight + BATCH * image * (3 + 8)
    assert found.value_nbytes == BATCH * image * 8
    assert found.parameters == {"conv.weight": weight}
    assert found.gradients == 1  # the data need no gradient


def test_a_matrix_product() -> None:
    found = operations()["fc"]
    assert found.work == "matrix"
    assert found.flops == 2 * BATCH * 8 * 32 * 32 * 10
    assert found.parameters == {"fc.weight": 4 * 8 * 32 * 32 * 10, "fc.bias": 40}
    assert found.gradients == 2  # the gradients of its input and of its parameters


def test_an_activation_reads_and_writes_once() -> None:
    found = operations()["relu"]
    elements = BATCH * 8 * 32 * 32
    assert (found.work, found.flops, found.nbytes, found.gradients) == ("activation", elements, 2 * 4 * elements, 1)


@pytest.mark.parametrize("name", ["x", "flatten", "same"])
def test_what_makes_no_new_tensor_costs_nothing(name: str) -> None:
    found = operations()[name]
    assert (found.flops, found.nbytes, found.gradients) == (0, 0, 0)


def test_only_what_follows_a_parameter_needs_a_gradient() -> None:
    assert [name for name, found in operations().items() if not found.trains] == ["x"]


def test_a_value_dependent_network_is_refused() -> None:
    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nonzero()

    with torch.device("meta"):
        traced = trace(Counting())
        with pytest.raises(UsageError, match="cannot be determined from shapes"):
            operations_of(traced, torch.empty(BATCH, 3, 32, 32))
