"""A network on several devices trains bit for bit as in one process, and sends the edges of its graph."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional

from bench.extensions.place.assignment import ActivationPolicy, Route, assign, trace
from bench.extensions.place.device import Stage
from bench.extensions.place.messages import receive_tensor, send_tensor
from bench.extensions.place.topology import Device
from bench.models.base import Model
from bench.models.cnn import SmallCnn
from bench.models.resnet import ResNet20
from collectives.transport.base import TransportError
from tests.extensions.place.devices import pool_of
from tests.testing.memory_transport import MemoryTransport, run_threads

HEADER = 64
BATCH = 4
POOL = pool_of("gpu", "fpga", "asic", "dpu")
TWO_OF_A_KIND = (*pool_of("gpu", "asic"), Device(name="gpu1", role="gpu", kind="gpu"))


class Diamond(nn.Module):
    """A value with three users on two devices, for which the order of the gradients matters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 32 * 32, 10)
        self.second = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        bent = functional.tanh(x)
        linear = self.second(x)
        return linear + bent * functional.sigmoid(x) + x


class InPlace(nn.Module):
    """Uses the old name of tensors changed in place by a method, a module and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 32 * 32, 10)
        self.second = nn.Linear(10, 10)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        y = self.second(x)
        y.add_(x)
        z = self.relu(y) * self.second(y)
        functional.relu(z, inplace=True)
        return z + x


class Shared(nn.Module):
    """Two layers with one weight that are placed on different devices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 32 * 32, 10)
        self.second, self.third = nn.Linear(10, 10), nn.Linear(10, 10)
        self.third.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(functional.tanh(self.second(functional.tanh(self.first(x.flatten(1))))))


def make(model: Model | type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return model.build(10) if isinstance(model, Model) else model()


def batches(num_steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        yield torch.randn(BATCH, 3, 32, 32, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


History = list[dict[str, torch.Tensor]]


def in_one_process(model: nn.Module, num_steps: int) -> tuple[list[float], History]:
    """Return the losses, and the gradients of every step by name."""
    losses, gradients = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for x, y in batches(num_steps):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def on_devices(
    models: list[nn.Module], pool: tuple[Device, ...], num_steps: int, activations: ActivationPolicy
) -> tuple[list[float], History, list[dict[str, torch.Tensor]], dict[tuple[int, int], int]]:
    """Return losses, gradients, buffers, and the bytes sent by (from, to)."""
    graphs = [trace(model) for model in models]  # tracing patches torch temporarily, so threads must not trace at once
    index_of = {device.name: index for index, device in enumerate(pool)}

    def work(transport: MemoryTransport) -> tuple[list[float], History, dict[str, torch.Tensor], dict[int, int]]:
        traced = graphs[transport.rank]
        placed = assign(traced, pool, activations).device_of
        route = Route(
            traced=traced, device_of={name: index_of[d] for name, d in placed.items()}, ranks=range(len(pool))
        )
        stage = Stage(route, transport.rank, transport, torch.device("cpu"))
        parameters = stage.parameters
        optimizer = torch.optim.SGD(parameters.values(), lr=0.02, momentum=0.9) if parameters else None
        losses, gradients = [], []
        for x, y in batches(num_steps):
            loss = stage.forward(x if stage.takes_input else None, lambda z, y=y: functional.cross_entropy(z, y))
            stage.backward()
            if loss is not None:
                losses.append(float(loss.detach()))
            gradients.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        return losses, gradients, stage.buffers, dict(stage.sent_bytes)

    found = run_threads(work, len(pool))
    losses = [loss for each, *_ in found for loss in each]
    gradients = [
        {name: g for _, of_device, *_ in found for name, g in of_device[step].items()} for step in range(num_steps)
    ]
    sent = {(rank, to): nbytes for rank, (*_, links) in enumerate(found) for to, nbytes in links.items()}
    return losses, gradients, [buffers for _, _, buffers, _ in found], sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pool", "activations", "num_steps"),
    [
        (SmallCnn(), POOL, "turns", 50),
        (ResNet20(), POOL, "asic", 50),
        (SmallCnn(), pool_of("gpu", "dpu"), "asic", 5),
        (SmallCnn(), pool_of("gpu"), "asic", 5),
        (Diamond, pool_of("gpu", "asic"), "asic", 20),
        (Diamond, POOL, "turns", 20),
        (InPlace, POOL, "turns", 5),
        (Shared, TWO_OF_A_KIND, "asic", 5),
    ],
    ids=["small_cnn", "resnet20", "two devices", "one device", "diamond", "diamond on three", "in place", "shared"],
)
def test_losses_gradients_and_statistics_are_those_of_one_process(
    model: Model | type[nn.Module], pool: tuple[Device, ...], activations: ActivationPolicy, num_steps: int
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = make(model)
        expected_losses, expected = in_one_process(alone, num_steps)
        losses, gradients, buffers, _ = on_devices([make(model) for _ in pool], pool, num_steps, activations)
    finally:
        torch.set_num_threads(threads)
    assert losses == expected_losses
    for step in range(num_steps):
        assert gradients[step].keys() == expected[step].keys()
        for name, gradient in gradients[step].items():
            assert torch.equal(gradient, expected[step][name]), (step, name)
    merged = {name: buffer for of_device in buffers for name, buffer in of_device.items()}
    assert merged.keys() == dict(alone.named_buffers()).keys()
    assert all(torch.equal(merged[name], buffer) for name, buffer in alone.named_buffers())


def edges(model: nn.Module, pool: tuple[Device, ...]) -> dict[tuple[int, int], int]:
    """Return the bytes per step from device to device, counted from the graph alone."""
    traced = fx.symbolic_trace(model)
    ShapeProp(traced).propagate(torch.zeros(BATCH, 3, 32, 32))
    placed = assign(traced, pool, "turns").device_of
    index = {device.name: i for i, device in enumerate(pool)}
    size = {n.name: HEADER + 4 * n.meta["tensor_meta"].shape.numel() for n in traced.graph.nodes if n.op != "output"}
    bytes_of: dict[tuple[int, int], int] = collections.defaultdict(int)
    told = set()
    for node in traced.graph.nodes:
        for user in node.users:
            if user.op == "output" or placed[user.name] == placed[node.name]:
                continue
            here, there = index[placed[node.name]], index[placed[user.name]]
            if (node, there) not in told:
                told.add((node, there))
                bytes_of[here, there] += size[node.name]
            if node.op != "placeholder":  # the gradient of the input is not needed
                bytes_of[there, here] += size[node.name]
    return dict(bytes_of)


@pytest.mark.parametrize("model", [SmallCnn(), ResNet20(), Diamond], ids=["small_cnn", "resnet20", "diamond"])
def test_bytes_through_each_link_are_those_of_the_graphs_edges(model: Model | type[nn.Module]) -> None:
    *_, sent = on_devices([make(model) for _ in POOL], POOL, 2, "turns")
    assert sent == {link: 2 * nbytes for link, nbytes in edges(make(model), POOL).items()}


def test_tensors_arrive_as_they_were_sent() -> None:
    given = [
        torch.randn(2, 3, 4), torch.zeros(0, 5), torch.tensor(7), torch.arange(6).view(2, 3).t(),
        torch.tensor([True, False]), torch.randn(3).bfloat16(), None,
    ]  # fmt: skip

    def work(transport: MemoryTransport) -> list[tuple[torch.Tensor | None, bool]]:
        if transport.rank == 0:
            for index, tensor in enumerate(given):
                pendings, _ = send_tensor(transport, tensor, 1, wants_gradient=index == 0)
                for pending in pendings:
                    pending.wait()
            return []
        return [receive_tensor(transport, 0, torch.device("cpu")) for _ in given]

    _, found = run_threads(work, 2)
    assert [wants for _, wants in found] == [True, *[False] * 6]
    for tensor, (arrived, _) in zip(given, found, strict=True):
        if tensor is None:
            assert arrived is None
        else:
            assert arrived is not None
            assert arrived.dtype == tensor.dtype
            assert torch.equal(arrived, tensor)


def test_what_is_no_tensor_is_refused() -> None:
    def work(transport: MemoryTransport) -> None:
        if transport.rank == 0:
            transport.send(torch.full((HEADER,), 255, dtype=torch.uint8), 1).wait()
        else:
            with pytest.raises(TransportError, match="rank 0 sent something that is not a tensor"):
                receive_tensor(transport, 0, torch.device("cpu"))

    run_threads(work, 2)
