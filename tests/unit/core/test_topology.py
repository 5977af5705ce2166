"""Device files: what they describe, and one sentence for each that describes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.core.errors import UsageError
from bench.core.topology import Topology

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
    assert Topology.from_dict(found.to_dict()) == found
    with pytest.raises(UsageError, match="not devices as `bench` writes them"):
        Topology.from_dict({"devices": []})


def test_pools_hold_one_share_of_every_role(tmp_path: Path) -> None:
    found = read(tmp_path, f"{GPU}count = 4\n{FPGA}count = 2\n").pools()
    names = [[device.name for device in pool] for pool in found]
    assert names == [["gpu0", "gpu2", "fpga0"], ["gpu1", "gpu3", "fpga1"]]


def test_pools_must_be_equal(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="3 devices of role gpu cannot be dealt to 2 equal pools"):
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
        ("[device]\n", "write each device as its own table"),
        ("role = \n", "is not TOML"),
    ],
)
def test_refusals_name_the_file(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "d.toml") in str(caught.value)
    assert sentence in str(caught.value)
