"""Device files: their contents, and one error message for each invalid one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.core.errors import UsageError
from bench.extensions.place.topology import Topology

EXAMPLE = Path(__file__).parents[3] / "examples" / "cxl.toml"
GPU = '[[device]]\nrole = "gpu"\nlink = "upi"\n'
FPGA = '[[device]]\nrole = "fpga"\nlink = "upi"\n'
SWITCH = '[[switch]]\nname = "s"\nlink = "upi"\n'


def read(tmp_path: Path, text: str) -> Topology:
    (tmp_path / "d.toml").write_text(text)
    return Topology.read(tmp_path / "d.toml")


def test_the_shipped_example() -> None:
    found = Topology.read(EXAMPLE)
    assert [device.name for device in found.devices] == ["gpu0", "fpga0", "asic0", "dpu0"]
    assert [link.node for link in found.route("gpu0", "asic0")] == ["gpu0", "asic0"]
    assert [link.node for link in found.route("gpu0", "host")] == ["gpu0", "switch"]
    assert [link.node for link in found.route("host", "gpu0")] == ["switch", "gpu0"]
    assert found.route("gpu0", "gpu0") == []


def test_devices_of_one_role_are_numbered_and_have_links_of_their_own(tmp_path: Path) -> None:
    found = read(tmp_path, f"{GPU}count = 2\n{FPGA}{GPU}")
    assert [device.name for device in found.devices] == ["gpu0", "gpu1", "fpga0", "gpu2"]
    assert [link.node for link in found.links] == ["gpu0", "gpu1", "fpga0", "gpu2"]


def test_its_values_bring_it_back(tmp_path: Path) -> None:
    found = read(tmp_path, GPU + FPGA)
    assert Topology.from_dict(dataclasses.asdict(found)) == found
    with pytest.raises(UsageError, match="not devices as `bench` writes them"):
        Topology.from_dict({"devices": []})


def test_pools_hold_one_share_of_every_role(tmp_path: Path) -> None:
    found = read(tmp_path, f"{GPU}count = 4\n{FPGA}count = 2\n").pools()
    names = [[device.name for device in pool] for pool in found]
    assert names == [["gpu0", "gpu2", "fpga0"], ["gpu1", "gpu3", "fpga1"]]


TWO_HOSTS = """
[[host]]
name = "left"

[[host]]
name = "right"

[[switch]]
name = "s"
link = "upi"
host = "left"

[[switch]]
name = "t"
link = "upi"
host = "right"

[[device]]
role = "gpu"
link = "upi"
to = "s"

[[device]]
role = "gpu"
link = "upi"
to = "t"
"""
HOSTS_JOINED = '[[link]]\nfrom = "right"\nto = "left"\nlink = "upi"\n'
SWITCHES_JOINED = '[[link]]\nfrom = "t"\nto = "s"\nlink = "cxl2x16"\n'


def test_pools_of_two_hosts_are_joined_by_a_link_between_the_hosts_or_between_their_switches(tmp_path: Path) -> None:
    through_hosts = read(tmp_path, TWO_HOSTS + HOSTS_JOINED)
    assert [link.node for link in through_hosts.route("gpu0", "gpu1")] == ["gpu0", "s", "right", "t", "gpu1"]
    assert through_hosts.host == "left"
    assert [[device.name for device in pool] for pool in through_hosts.pools()] == [["gpu0"], ["gpu1"]]
    both = read(tmp_path, TWO_HOSTS + HOSTS_JOINED + SWITCHES_JOINED)
    assert [(link.node, link.kind) for link in both.route("gpu0", "gpu1")] == [
        ("gpu0", "upi"),
        ("t", "cxl2x16"),
        ("gpu1", "upi"),
    ]
    assert [link.node for link in both.route("left", "gpu1")] in (["right", "t", "gpu1"], ["s", "t", "gpu1"])
    assert Topology.from_dict(dataclasses.asdict(both)) == both


def test_each_host_has_pools_of_its_own(tmp_path: Path) -> None:
    text = TWO_HOSTS + HOSTS_JOINED + FPGA + 'host = "right"\n' + FPGA + 'host = "left"\n'
    names = [[device.name for device in pool] for pool in read(tmp_path, text).pools()]
    assert names == [["gpu0", "fpga1"], ["gpu1", "fpga0"]]
    with pytest.raises(
        UsageError, match="groups must be equal: one has gpu, fpga, another gpu; give every host the same"
    ):
        read(tmp_path, TWO_HOSTS + HOSTS_JOINED + FPGA + 'host = "left"\n').pools()


def test_pools_must_be_equal(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="3 devices of role gpu cannot be divided into 2 equal groups, each for one copy of the model"
    ):
        read(tmp_path, f"{GPU}count = 3\n{FPGA}count = 2\n").pools()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "0 devices are not possible"),
        (GPU.replace("gpu", "gpo"), "there is no role 'gpo' (did you mean 'gpu'?)"),
        ('[[device]]\nrole = "gpu"\n', "device 1 (gpu0) has no link"),
        (
            GPU + 'to = "spin"\n' + SWITCH.replace('"s"', '"spine"'),
            "'spin', which is not there (did you mean 'spine'",
        ),
        (GPU + SWITCH + 'to = "t"\n' + SWITCH.replace('"s"', '"t"') + 'to = "s"\n', "links form a circle: s -> t -> s"),
        (GPU + SWITCH + 'to = "s"\n', "links form a circle: s -> s"),
        (GPU + SWITCH + SWITCH, "two nodes are named 's'"),
        (GPU + SWITCH.replace('"s"', '"gpu0"'), "two nodes are named 'gpu0'"),
        (GPU + SWITCH.replace('"s"', '"host"'), "two nodes are named 'host'"),
        (GPU + "counts = 2\n", "there is no 'counts' (did you mean 'count'?)"),
        (GPU + "count = 0\n", "count=0 is not possible"),
        (GPU + "count = 65\n", "count makes more than 64 devices"),
        ("[host]\nkinds = 1\n" + GPU, "there is no 'kinds' (did you mean 'kind'?)"),
        ("hosts = 1\n" + GPU, "there is no 'hosts' (did you mean 'host'?)"),
        ("host = 1\n" + GPU, "write the host as a table"),
        (TWO_HOSTS, "no link joins right to left; add one under the heading [[link]]"),
        (TWO_HOSTS + HOSTS_JOINED.replace('"left"', '"lft"'), "'lft', which is not there (did you mean 'left'?)"),
        (TWO_HOSTS + HOSTS_JOINED.replace('"left"', '"gpu0"'), "a [[link]] joins gpu0, which is a device"),
        (TWO_HOSTS + HOSTS_JOINED + FPGA + 'host = "rigth"\n', "there is no host 'rigth' (did you mean 'right'?)"),
        (TWO_HOSTS + HOSTS_JOINED + FPGA + 'host = "left"\nto = "s"\n', "give one of them"),
        (TWO_HOSTS.replace('name = "right"', "", 1) + HOSTS_JOINED, "host 2 has no name"),
        ("[device]\n", "write each device as its own table"),
        ("role = \n", "is not TOML"),
    ],
)
def test_refusals_name_the_file(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "d.toml") in str(caught.value)
    assert sentence in str(caught.value)
