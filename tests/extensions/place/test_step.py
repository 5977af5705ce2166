"""A training step's tasks: an example computed by hand, bytes counted independently, and monotonicity (T14)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.extensions.place.assignment import Work, assign
from bench.extensions.place.catalog import Catalog, DeviceKind, Efficiency, LinkKind
from bench.extensions.place.placements import Cost
from bench.extensions.place.step import CatalogTimes, DeviceJob, Operation, end_times, network_of, step_tasks
from bench.extensions.place.topology import Device, Host, Link, Topology

ROLES = ("gpu", "fpga", "asic")


def topology(pools: int = 1) -> Topology:
    devices = tuple(Device(name=f"{role}{pool}", role=role, kind="plain") for role in ROLES for pool in range(pools))
    links = tuple(Link(node=device.name, to="host", kind="wire") for device in devices)
    return Topology(devices=devices, links=links)


def catalog(latency_s: float = 1, bytes_per_s: float = 10) -> Catalog:
    """Return devices with 1 flop/s, 100 bytes/s of memory and no launch time."""
    always = Efficiency(matrix=1, convolution=1, activation=1, other=1)
    device = DeviceKind(
        flops_per_s=1, memory_bytes_per_s=100, launch_s=0, efficiency=always, figures="nominal", source=""
    )
    link = LinkKind(bytes_per_s=bytes_per_s, latency_s=latency_s, figures="nominal", source="")
    return Catalog(links={"wire": link}, devices={"plain": device})


def operation(name: str, work: Work, flops: float, value_nbytes: int, reads: str, weight: int = 0) -> Operation:
    return Operation(
        name=name,
        kind=work,
        work=work,
        flops=flops,
        nbytes=1,
        value_nbytes=value_nbytes,
        parameters={f"{name}.weight": weight} if weight else {},
        inputs=(reads,) if reads else (),
        is_input=not reads,
        trains=bool(reads),
        gradients=(reads != "x") + (weight > 0) if reads else 0,
    )


NOTHING = dataclasses.replace(operation("x", "other", flops=0, value_nbytes=100, reads=""), nbytes=0)
CONVOLUTION = operation("conv", "convolution", flops=4, value_nbytes=50, reads="x", weight=20)
ACTIVATION = operation("relu", "activation", flops=1, value_nbytes=50, reads="conv")
MATRIX = operation("fc", "matrix", flops=2, value_nbytes=10, reads="relu", weight=40)
THREE = [NOTHING, CONVOLUTION, ACTIVATION, MATRIX]
BY_TYPE = {"x": "fpga0", "conv": "fpga0", "relu": "asic0", "fc": "gpu0"}


def three_nodes(figures: Catalog) -> list[DeviceJob]:
    return step_tasks(THREE, [BY_TYPE], topology(), CatalogTimes(figures), batch_size=1)


def test_three_nodes_by_hand() -> None:
    """Each path between devices has two links: 2 s of latency, and 5 s for 50 bytes at 10 bytes per second."""
    tasks = three_nodes(catalog())
    assert end_times(tasks) == pytest.approx(
        {
            "0 batch x": 11,  # one link: 1 s and 100 bytes
            "0 batch labels": 1.8,  # one label of 8 bytes
            "0 forward x": 11,
            "0 forward conv": 15,
            "0 forward conv to asic0": 22,
            "0 forward relu": 23,
            "0 forward relu to gpu0": 30,
            "0 forward fc": 32,
            "0 backward fc": 36,  # the gradients of its input and of its weight
            "0 backward relu from fc": 43,
            "0 backward relu": 44,
            "0 backward conv from relu": 51,
            "0 backward conv": 55,  # only the gradient of its weight
            "update fpga0": 56,  # 5 x 20 bytes at 100 bytes per second
            "update gpu0": 38,
        }
    )
    cost = Cost.of(tasks, [BY_TYPE], topology())
    assert (cost.makespan_s, cost.critical_path_s) == pytest.approx((56, 56))
    assert (cost.compute_s, cost.transfer_s) == pytest.approx((19, 40.8))
    assert cost.serial_s == pytest.approx(59.8)
    assert cost.transfer_share == pytest.approx(40.8 / 59.8)
    assert (cost.cut_nbytes, cost.cut_transfers) == (200, 4)
    assert {link.node: (link.nbytes_to_host, link.nbytes_from_host) for link in cost.links} == {
        "fpga0": (50, 150),
        "asic0": (100, 100),
        "gpu0": (50, 58),
    }
    assert {device.name: (device.operations, device.busy_s) for device in cost.devices} == {
        "fpga0": (2, 9),
        "asic0": (1, 2),
        "gpu0": (1, 8),
    }


def test_the_break_even_rate_by_hand() -> None:
    """200 bytes for 30 s less computing than on a single device, which takes 49 s."""
    placed = Cost.of(three_nodes(catalog()), [BY_TYPE], topology())
    single = dataclasses.replace(placed, compute_s=49, cut_nbytes=0)
    assert placed.break_even_bytes_per_s(single) == pytest.approx(200 / 30)
    assert placed.break_even_bytes_per_s(dataclasses.replace(single, cut_nbytes=50)) == pytest.approx(150 / 30)
    assert placed.break_even_bytes_per_s(dataclasses.replace(single, compute_s=19)) is None


@pytest.mark.parametrize("slower", [catalog(latency_s=1.5), catalog(bytes_per_s=9)], ids=["latency", "rate"])
def test_a_slower_link_makes_the_step_longer(slower: Catalog) -> None:
    assert max(end_times(three_nodes(slower)).values()) > max(end_times(three_nodes(catalog())).values())


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Operation], list[Mapping[str, str]]]:
    """Draw operations that read earlier ones, on devices of one or two pools."""
    operations = [NOTHING]
    for index in range(draw(st.integers(1, 12))):
        earlier = draw(st.sets(st.sampled_from(operations[-3:]).map(lambda each: each.name), min_size=1))
        operations.append(
            dataclasses.replace(
                MATRIX,
                name=f"n{index}",
                inputs=tuple(sorted(earlier)),
                flops=draw(st.integers(0, 20)),
                value_nbytes=draw(st.integers(0, 500)),
                parameters={f"n{index}.weight": 8} if draw(st.booleans()) else {},
            )
        )
    roles = {each.name: draw(st.sampled_from(ROLES)) for each in operations}
    pools = draw(st.integers(1, 2))
    return operations, [{name: f"{role}{pool}" for name, role in roles.items()} for pool in range(pools)]


def cost_of(
    operations: list[Operation], device_of: list[Mapping[str, str]], figures: Catalog, batch_size: int = 4
) -> Cost:
    there = topology(pools=len(device_of))
    tasks = step_tasks(operations, device_of, there, CatalogTimes(figures), batch_size=batch_size)
    return Cost.of(tasks, device_of, there)


@given(network=networks(), data=st.data())
def test_any_step_is_bounded_and_grows_with_bytes_latency_and_slowness(
    network: tuple[list[Operation], list[Mapping[str, str]]], data: st.DataObject
) -> None:
    operations, device_of = network
    base = cost_of(operations, device_of, catalog())
    assert base.critical_path_s <= base.makespan_s + 1e-9
    assert base.makespan_s <= base.serial_s + 1e-9
    index = data.draw(st.integers(0, len(operations) - 1))
    larger = list(operations)
    larger[index] = dataclasses.replace(operations[index], value_nbytes=operations[index].value_nbytes + 100)
    for grown in (
        cost_of(larger, device_of, catalog()),
        cost_of(operations, device_of, catalog(latency_s=1.25)),
        cost_of(operations, device_of, catalog(bytes_per_s=8)),
        cost_of(operations, device_of, catalog(), batch_size=8),
    ):
        assert grown.makespan_s >= base.makespan_s - 1e-9


def test_bytes_between_devices_are_those_of_the_graphs_edges() -> None:
    traced, operations = network_of("resnet20", num_classes=10, batch_size=2)
    pool = topology().pools()[0]
    home = assign(traced, pool).device_of
    by_name = {operation.name: operation for operation in operations}
    crossing = [
        (node, home[user.name])
        for node in traced.graph.nodes
        for user in node.users
        if user.op != "output" and home[user.name] != home[node.name]
    ]
    forward = [by_name[node.name].value_nbytes for node, _ in set(crossing)]  # once per device that uses it
    back = [by_name[node.name].value_nbytes for node, _ in crossing if node.op != "placeholder"]
    cost = cost_of(operations, [home], catalog(), batch_size=2)
    assert cost.cut_transfers == len(forward) + len(back)
    assert cost.cut_nbytes == sum(forward) + sum(back)
    assert cost.cut_nbytes > 0


def test_a_value_goes_once_to_a_device_and_a_gradient_comes_back_from_each_operation() -> None:
    """The devices do the same: gradients are added on the device of the value, in the order of a single process."""
    twice = [NOTHING, CONVOLUTION, ACTIVATION, dataclasses.replace(MATRIX, inputs=("conv", "relu"))]
    device_of = BY_TYPE | {"fc": "asic0"}
    tasks = step_tasks(twice, [device_of], topology(), CatalogTimes(catalog()), batch_size=1)
    passed = [task.name for task in tasks if task.purpose == "values"]
    assert passed == ["0 forward conv to asic0", "0 backward conv from relu", "0 backward conv from fc"]


def test_one_device_passes_nothing_to_another() -> None:
    cost = cost_of(THREE, [dict.fromkeys(BY_TYPE, "gpu0")], catalog())
    assert (cost.cut_nbytes, cost.cut_transfers) == (0, 0)
    assert [link.nbytes_to_host for link in cost.links] == [0, 0, 0]


def test_two_pools_add_their_gradients_in_the_hosts_memory() -> None:
    """Each of n=2 pools writes N (1 + 1/n) and reads 2 N (n-1)/n bytes for its N bytes of gradients."""
    device_of = [BY_TYPE, {name: device.replace("0", "1") for name, device in BY_TYPE.items()}]
    there = topology(pools=2)
    tasks = step_tasks(THREE, device_of, there, CatalogTimes(catalog()), batch_size=1)
    passed = collections.Counter[str]()
    for task in tasks:
        if task.purpose == "sum":
            passed.update(dict.fromkeys(task.uses, task.nbytes))
    assert passed == {
        **{f"fpga{pool} to host": 30 for pool in (0, 1)},
        **{f"host to fpga{pool}": 20 for pool in (0, 1)},
        **{f"gpu{pool} to host": 60 for pool in (0, 1)},
        **{f"host to gpu{pool}": 40 for pool in (0, 1)},
    }
    ends = end_times(tasks)
    assert ends["update gpu0"] > ends["take gpu0"] > ends["add gpu1"] > ends["publish gpu1"] > ends["1 backward fc"]


def test_what_goes_to_another_hosts_pool_passes_the_link_between_the_hosts() -> None:
    hosts = (Host(name="left"), Host(name="right"))
    devices = tuple(Device(name=f"{role}{pool}", role=role, kind="plain") for pool in range(2) for role in ROLES)
    links = tuple(Link(node=device.name, to=hosts[device.name[-1] == "1"].name, kind="wire") for device in devices)
    there = Topology(hosts=hosts, devices=devices, links=links, bridges=(Link(node="right", to="left", kind="wire"),))
    device_of = [BY_TYPE, {name: device.replace("0", "1") for name, device in BY_TYPE.items()}]
    tasks = step_tasks(THREE, device_of, there, CatalogTimes(catalog()), batch_size=1)
    passed = {task.name: task.nbytes for task in tasks if {"left to right", "right to left"} & set(task.uses)}
    assert passed["1 batch x"] == 100
    assert not any(name.startswith("0 ") for name in passed)
    assert sum(nbytes for name, nbytes in passed.items() if name.startswith("publish")) == 20 + 40
    ends = end_times(tasks)
    assert ends["1 batch x"] > ends["0 batch x"]  # one more link
