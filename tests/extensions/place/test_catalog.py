"""The catalogue: the shipped entries, entries of a user, and refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from bench.core.errors import UsageError
from bench.extensions.place.assignment import Work
from bench.extensions.place.catalog import SHIPPED, SHM, Catalog, Efficiency, folders
from bench.extensions.place.step import CatalogTimes, Operation
from bench.extensions.place.topology import ROLES, Device, Host, Link, Topology

LINK = '[link.mine]\ngbytes_per_s = 40\nlatency_us = 0.5\nsource = "a sheet"\n'
DEVICE = '[device.mine]\ntflops = 10\ngbytes_per_s = 900\nlaunch_us = 5\nsource = "a sheet"\n'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "gradwire" / "catalog"
    folder.mkdir(parents=True)
    return folder


def test_every_figure_that_is_shipped_is_nominal_and_has_a_source() -> None:
    shipped = Catalog.read([SHIPPED])
    buses = {f"pcie{generation}x16" for generation in (3, 4, 5, 6)} | {"cxl2x8", "cxl2x16", "cxl3x16", "upi", "qpi"}
    networks = {f"eth{rate}g" for rate in (1, 10, 25, 100, 200)} | {"nvlink4", "wifi"}
    assert set(shipped.links) == buses | networks
    assert set(ROLES) <= set(shipped.devices)
    for kind in (*shipped.links.values(), *shipped.devices.values()):
        assert kind.figures == "nominal"
        assert kind.source
    assert (shipped.links["pcie6x16"].bytes_per_s, shipped.links["wifi"].latency_s) == pytest.approx((121e9, 2e-3))


def test_efficiency_knows_every_kind_of_work() -> None:
    assert tuple(field.name for field in dataclasses.fields(Efficiency)) == get_args(Work)


def test_a_users_entry_replaces_the_shipped_one_and_the_named_folder_wins(home: Path, tmp_path: Path) -> None:
    (home / "a.toml").write_text(LINK.replace("mine", "upi") + LINK)
    own = tmp_path / "own"
    own.mkdir()
    (own / "b.toml").write_text(LINK.replace("40", "41") + DEVICE + "efficiency = { matrix = 0.9 }\n")
    found = Catalog.read(folders(own))
    assert found.links["upi"].bytes_per_s == pytest.approx(40e9)
    assert found.links["mine"].bytes_per_s == pytest.approx(41e9)
    assert found.links["qpi"].bytes_per_s == pytest.approx(19e9)
    assert found.devices["mine"].efficiency == Efficiency(matrix=0.9)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LINK.replace("latency_us", "latenzy_us"), "there is no 'latenzy_us' (did you mean 'latency_us'?)"),
        (LINK.replace("40", "0"), "gbytes_per_s=0 is not possible"),
        (LINK.replace("40", "nan"), "gbytes_per_s=nan is not possible"),
        (LINK.replace("40", "true"), "gbytes_per_s=True is not possible"),
        (LINK.replace("latency_us = 0.5\n", ""), "has no latency_us"),
        (LINK.replace("source", "figures"), "figures='a sheet' is not possible; choose nominal or measured"),
        ("[[link]]\n", "write each link as its own table under a heading like [link.name]"),
        (DEVICE + "efficiency = 0.5\n", "efficiency=0.5 is not a table"),
        (DEVICE + "efficiency = { matrix = 2 }\n", "matrix=2 is not possible; give a number above 0, at most 1"),
        (DEVICE + "efficiency = { matricks = 1 }\n", "there is no 'matricks' (did you mean 'matrix'?)"),
        ("[links.mine]\n", "there is no 'links' (did you mean 'link'?)"),
    ],
)
def test_refusals_name_file_and_entry(home: Path, text: str, sentence: str) -> None:
    (home / "a.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        Catalog.read(folders(None))
    assert str(home / "a.toml") in str(caught.value)
    assert sentence in str(caught.value)


def test_a_named_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no folder with \.toml files"):
        folders(tmp_path / "absent")


@pytest.mark.parametrize(
    ("link", "kind", "sentence"),
    [
        ("cxl2x15", "gpu", "the catalogue has no link 'cxl2x15' (did you mean 'cxl2x16'?)"),
        ("cxl2x16", "gpuu", "the catalogue has no device 'gpuu' (did you mean 'gpu'?)"),
    ],
)
def test_unknown_kinds_of_a_device_file_are_refused(link: str, kind: str, sentence: str) -> None:
    device = Device(name="gpu0", role="gpu", kind=kind)
    there = Topology(devices=(device,), links=(Link(node="gpu0", to="host", kind=link),))
    with pytest.raises(UsageError) as caught:
        Catalog.read([SHIPPED]).check(there)
    assert sentence in str(caught.value)


def test_the_kind_of_the_host_has_figures_too_and_what_is_measured_needs_none() -> None:
    device = Device(name="gpu0", role="gpu", kind="gpu")
    there = Topology(hosts=(Host(kind="nonsense"),), devices=(device,), links=(Link(node="gpu0", to="host", kind=SHM),))
    with pytest.raises(UsageError, match="the catalogue has no device 'nonsense'"):
        Catalog.read([SHIPPED]).check(there, SHM)
    there = dataclasses.replace(there, hosts=(Host(),))
    Catalog.read([SHIPPED]).check(there, SHM)
    with pytest.raises(UsageError, match="the catalogue has no link 'shm'"):
        Catalog.read([SHIPPED]).check(there)


def test_an_operation_takes_its_arithmetic_or_its_memory_traffic_whichever_is_longer() -> None:
    times = CatalogTimes(Catalog.read([SHIPPED]))
    gpu = Device(name="gpu0", role="gpu", kind="gpu")
    operation = Operation(
        name="a", kind="relu", work="activation", flops=1e12, nbytes=155 * 10**7, value_nbytes=1, parameters={},
        inputs=(), is_input=False, trains=True, gradients=2,
    )  # fmt: skip
    assert times.forward(operation, gpu) == pytest.approx(1e12 / (20e12 * 0.05) + 5e-6)
    memory_bound = dataclasses.replace(operation, flops=1e10, nbytes=155 * 10**9)
    assert times.forward(memory_bound, gpu) == pytest.approx(0.1 + 5e-6)
    assert times.backward(memory_bound, gpu) == pytest.approx(0.2 + 10e-6)
    assert times.forward(dataclasses.replace(operation, nbytes=0), gpu) == 0


def test_a_transfer_adds_latencies_and_has_the_slowest_rate() -> None:
    times = CatalogTimes(Catalog.read([SHIPPED]))
    route = [Link(node="a", to="host", kind="pcie3x16"), Link(node="b", to="host", kind="eth10g")]
    assert times.transfer(route, 1_250_000) == pytest.approx(1e-6 + 20e-6 + 1e-3)
