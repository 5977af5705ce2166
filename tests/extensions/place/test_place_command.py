"""`bench place`: a step modelled on the shipped file, and one sentence for every bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.testing import third_party
from tests.testing.invoke import REPOSITORY, execute, invoke, only_run, rows
from tests.testing.plugins import install_entry_points

EXAMPLE = str(REPOSITORY / "examples" / "cxl.toml")
HEADER_NBYTES = 64
SHM = '[link.shm]\ngbytes_per_s = 5\nlatency_us = 9\nsource = "mine"\n'
GPU = '[[device]]\nrole = "gpu"\nlink = "upi"\n'
SWITCH = '[[switch]]\nname = "s"\nlink = "upi"\n'


def test_a_small_network_on_the_shipped_devices() -> None:
    answer = execute("place", "--model", "small_cnn", "--devices", EXAMPLE, "--json")
    assert answer.code == 0, answer.error
    told = json.loads(answer.out)
    assert told["links"]["shm"]["figures"] == "measured"
    assert told["links"]["cxl2x16"]["figures"] == "nominal"
    assert set(told["by_link"]) == set(told["links"])
    for cost in told["placements"].values():
        assert cost["critical_path_s"] <= cost["makespan_s"] * (1 + 1e-9)
        assert cost["makespan_s"] <= cost["serial_s"] * (1 + 1e-9)
    by_type, without = (told["placements"][name] for name in ("by type", "matrix and convolution only"))
    assert {device["name"]: device["operations"] for device in by_type["devices"]} == {
        "fpga0": 9,  # the input, four convolutions and their normalisations
        "asic0": 6,  # five activations, and flatten, which follows one of them
        "gpu0": 2,
        "dpu0": 0,
    }
    assert by_type["cut_nbytes"] > without["cut_nbytes"] > 0
    assert told["by_link"]["eth1g"]["by type"] > told["by_link"]["eth10g"]["by type"]


@pytest.mark.long
def test_images_of_another_size_pass_more_between_devices() -> None:
    def cut(*options: str) -> int:
        answer = invoke("place", "--model", "resnet18:stem=imagenet", "--devices", EXAMPLE, "--json", *options)
        assert answer.code == 0, answer.error
        return int(json.loads(answer.out)["placements"]["by type"]["cut_nbytes"])

    assert cut("--image-size", "224") > 40 * cut()
    answer = invoke("place", "--model", "linear", "--devices", EXAMPLE, "--image-size", "64")
    assert (answer.code, "linear cannot take inputs of 3x64x64" in answer.error) == (2, True)


@pytest.mark.long
def test_the_bytes_are_those_that_a_run_counts_less_its_headers(tmp_path: Path) -> None:
    answer = execute(
        "run", "--model", "resnet20", "--strategy", f"placed:devices={EXAMPLE}", "--steps", "2", "--eval-every", "0",
        "--train-size", "256", "--test-size", "10", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert answer.code == 0, answer.error
    counted = [row for row in rows(only_run(tmp_path / "out"), "links.csv") if row["source"] != "host"]
    modelled = placement("by type", "resnet20", tmp_path)
    headers = HEADER_NBYTES * modelled["cut_transfers"]
    assert sum(float(row["activation_bytes"]) for row in counted) == modelled["cut_nbytes"] + headers


def placement(title: str, model: str, folder: Path) -> dict[str, Any]:
    (folder / "mine.toml").write_text(SHM)  # nothing is measured
    answer = invoke("place", "--model", model, "--devices", EXAMPLE, "--catalog", str(folder), "--json")
    assert answer.code == 0, answer.error
    found: dict[str, Any] = json.loads(answer.out)["placements"][title]
    return found


def test_the_table_says_where_every_figure_comes_from(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SHM)
    answer = invoke("place", "--model", "resnet20", "--devices", EXAMPLE, "--catalog", str(tmp_path))
    assert answer.code == 0, answer.error
    for text in (
        "one training step, modelled",
        "busy (modelled)",
        "nominal",
        "Placing by type loses",
        "breaks even at",
    ):
        assert text in answer.out
    assert "measured" not in answer.out  # the user's own entry is not measured again


def test_every_pool_holds_a_replica_and_they_add_their_gradients(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text(GPU + "count = 2\n" + GPU.replace("gpu", "fpga") + "count = 2\n")
    (tmp_path / "mine.toml").write_text(SHM)
    answer = invoke(
        "place", "--model", "linear", "--devices", str(tmp_path / "devices"), "--catalog", str(tmp_path), "--json"
    )
    assert answer.code == 0, answer.error
    cost = json.loads(answer.out)["placements"]["all on gpu0/gpu1"]
    assert [device["operations"] for device in cost["devices"]] == [3, 3, 0, 0]  # the input, flatten, the matrix
    gradient = 4 * 30_730
    assert [link["nbytes_to_host"] for link in cost["links"]] == [gradient * 3 / 2, gradient * 3 / 2, 0, 0]


def test_a_network_on_one_device_is_said_to_be_that(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SHM)
    answer = invoke("place", "--model", "linear", "--devices", EXAMPLE, "--catalog", str(tmp_path), "--json")
    assert answer.code == 0, answer.error
    (note,) = json.loads(answer.out)["notes"]
    assert note.startswith("Placing by type puts everything on one device")


def test_a_missing_role_is_done_by_the_next_one_and_said(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text(GPU)
    (tmp_path / "mine.toml").write_text(SHM)
    answer = invoke(
        "place", "--model", "small_cnn", "--devices", str(tmp_path / "devices"), "--catalog", str(tmp_path), "--json"
    )
    assert answer.code == 0, answer.error
    assert "there is no fpga for convolution operations; gpu does them" in json.loads(answer.out)["notes"]


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        (GPU.replace("gpu", "gpo"), "there is no role 'gpo'"),
        (GPU + SWITCH + 'to = "s"\n', "links form a circle: s -> s"),
        ('[[device]]\nrole = "gpu"\n', "has no link"),
        (GPU + 'to = "s"\n', "leads to 's', which is not there"),
    ],
    ids=["role", "circle", "no link", "link to nobody"],
)
def test_devices_that_are_refused(tmp_path: Path, devices: str, sentence: str) -> None:
    (tmp_path / "d.toml").write_text(devices)
    answer = invoke("place", "--model", "small_cnn", "--devices", str(tmp_path / "d.toml"))
    assert answer.code == 2
    assert sentence in answer.error
    assert "\n" not in answer.error


def test_a_link_that_the_catalogue_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(GPU.replace("upi", "upy"))
    answer = invoke("place", "--model", "small_cnn", "--devices", str(tmp_path / "d.toml"))
    assert answer.code == 2
    assert "the catalogue has no link 'upy' (did you mean 'upi'?)" in answer.error


def test_a_model_that_cannot_be_traced(tmp_path: Path) -> None:
    shutil.copytree(Path(third_party.__file__).parent, tmp_path / "stranger")
    install_entry_points(tmp_path, "stranger", {"bench.models": {"branching": "stranger.branching:Branching"}})
    answer = execute("place", "--model", "branching", "--devices", EXAMPLE, PYTHONPATH=str(tmp_path))
    assert answer.code == 2
    assert answer.error.startswith("bench: the model cannot be traced (")
    assert answer.error.count("\n") == 1
