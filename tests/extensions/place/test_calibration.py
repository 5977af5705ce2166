"""The calibrated model recovers the parameters that generated the times, and a network can be timed node by node."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bench.extensions.place.assignment import assign, trace
from bench.extensions.place.step import Operation, network_of, operations_of
from bench.extensions.place.topology import Device, Link, Topology
from benchmarks.placed_calibration import UPDATE, CalibratedTimes, NodeByNode, PlacedNetwork, Sample, measure

TRUE = {("Conv2d", "forward"): (2e-5, 3e-11, 0.0), ("relu", "forward"): (1e-5, 0.0, 4e-10), UPDATE: (5e-4, 1e-5, 0.0)}


def samples() -> list[Sample]:
    found = []
    for kind, (constant, per_flop, per_byte) in TRUE.items():
        for flops, nbytes in ((1e6, 1e7), (3e8, 2e5), (5e7, 4e6), (1e3, 1e3)):
            seconds = constant + per_flop * flops + per_byte * nbytes
            found.append(Sample(kind=kind, flops=flops, nbytes=nbytes, seconds=seconds))
    return found


@functools.cache
def placed(model: str) -> PlacedNetwork:
    devices = tuple(Device(name=f"{role}0", role=role, kind=role) for role in ("gpu", "fpga", "asic"))
    links = tuple(Link(node=device.name, to="host", kind="shm") for device in devices)
    topology = Topology(devices=devices, links=links)
    traced, operations = network_of(model, num_classes=10, batch_size=8)
    device_of = assign(traced, devices).device_of
    return PlacedNetwork(operations=operations, device_of=device_of, topology=topology, batch_size=8)


def test_coefficients_that_made_the_samples_are_found() -> None:
    found = CalibratedTimes.fitted(samples(), 1e9).coefficients
    for kind, coefficients in TRUE.items():
        assert found[kind] == pytest.approx(coefficients, rel=1e-4, abs=1e-15)


@settings(max_examples=15)
@given(exponent=st.floats(-5, -3), slowdown=st.floats(0.5, 5))
def test_the_message_and_the_slowdown_that_made_the_steps_are_found(exponent: float, slowdown: float) -> None:
    start = CalibratedTimes.fitted([*samples(), backward_sample(1e3), backward_sample(1e8)], 1e9)
    true = CalibratedTimes(coefficients=start.coefficients, bytes_per_s=1e9, message_s=10**exponent, slowdown=slowdown)
    steps = [(network, true.step(network)) for network in map(placed, ("small_cnn", "resnet20"))]
    found = start.calibrated(steps)
    assert (found.message_s, found.slowdown) == pytest.approx((10**exponent, slowdown), rel=0.02)


def backward_sample(flops: float) -> Sample:
    return Sample(kind=("Conv2d", "backward"), flops=flops, nbytes=1e6, seconds=1e-4 + 6e-11 * flops)


def test_kinds_that_were_not_measured_cost_as_all_together() -> None:
    times = CalibratedTimes.fitted([*samples(), backward_sample(1e3)], 1e9)
    network = placed("resnet20")
    pooling = next(each for each in network.operations if each.kind == "AdaptiveAvgPool2d")
    device = network.topology.devices[0]
    assert ("AdaptiveAvgPool2d", "forward") not in times.coefficients
    constant, per_flop, per_byte = times.coefficients["any", "forward"]
    expected = constant + per_flop * pooling.flops + per_byte * pooling.nbytes
    assert times.forward(pooling, device) == pytest.approx(expected)


def test_times_by_hand() -> None:
    times = CalibratedTimes(
        coefficients={("Conv2d", "forward"): (1, 2, 3), ("Conv2d", "backward"): (4, 5, 6), UPDATE: (7, 8, 9)},
        bytes_per_s=10,
        message_s=11,
        slowdown=100,
    )
    network = placed("small_cnn")
    device, link = network.topology.devices[0], network.topology.links[0]
    found = next(each for each in network.operations if each.kind == "Conv2d")
    convolution = dataclasses.replace(found, flops=20, nbytes=30)
    assert times.forward(convolution, device) == 100 * (1 + 2 * 20 + 3 * 30)
    assert times.backward(convolution, device) == 100 * (4 + 5 * 20 + 6 * 30)
    assert times.update([40, 50], device) == 100 * (7 + 8 * 2 + 9 * 90)
    assert times.transfer([link, link], 60) == 11 + 6


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 32 * 32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.fc((y + torch.relu(y)).flatten(1))


def branched() -> tuple[Branched, list[Operation]]:
    torch.manual_seed(1)
    with torch.device("meta"):
        operations = operations_of(trace(Branched()), torch.empty(2, 3, 32, 32))
    return Branched(), operations


def test_node_by_node_makes_the_networks_gradients() -> None:
    network, operations = branched()
    x = torch.randn(2, 3, 32, 32)
    (1e-3 * network(x).sum()).backward()
    expected = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    runner = NodeByNode(trace(network), {operation.name: operation.kind for operation in operations})
    runner.run(x)
    runner.run_backward()
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_every_node_is_timed_forward_and_backward_and_no_parameter_changes() -> None:
    network, operations = branched()
    before = [parameter.detach().clone() for parameter in network.parameters()]
    found = measure(trace(network), operations, torch.randn(2, 3, 32, 32), repeats=1)
    names = ("Conv2d", "relu", "add", "flatten", "Linear")
    kinds = [(name, way) for name in names for way in ("forward", "backward")]
    assert sorted(sample.kind for sample in found) == sorted([*kinds, UPDATE, ("x", "forward")])
    assert all(torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True))
