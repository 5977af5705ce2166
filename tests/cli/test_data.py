"""`bench data`: states, preparing and verifying."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from bench.core import registry
from bench.datasets.base import Samples
from bench.datasets.built_in import Digits
from tests.testing.invoke import invoke


def test_every_data_set_is_listed_with_its_state(tmp_path: Path) -> None:
    listed = json.loads(invoke("data", "--json", "--data-dir", str(tmp_path)).out)
    assert [state["name"] for state in listed] == list(registry.entries("datasets"))
    by_name = {state["name"]: state for state in listed}
    assert by_name["digits"]["present"] is True
    assert by_name["cifar10"] == {
        "name": "cifar10",
        "train_size": 50_000,
        "test_size": 10_000,
        "num_classes": 10,
        "present": False,
        "status": "not prepared; run `bench data prepare cifar10`",
    }


def test_the_table_says_the_same(tmp_path: Path) -> None:
    answer = invoke("data", "list", "cifar100", "--data-dir", str(tmp_path))
    assert answer.code == 0
    assert "not prepared; run `bench data prepare cifar100`" in answer.out
    assert "digits" not in answer.out


def test_preparing_a_built_in_set_is_done_at_once(tmp_path: Path) -> None:
    answer = invoke("data", "prepare", "digits", "--data-dir", str(tmp_path))
    assert answer.code == 0
    assert "built in" in answer.out
    assert list(tmp_path.iterdir()) == []


def test_verifying_loads_the_whole_set() -> None:
    answer = invoke("data", "verify", "synthetic:train_size=70,test_size=30", "--json")
    assert answer.code == 0
    assert "70 training and 30 test samples can be loaded" in answer.error
    assert json.loads(answer.out)[0]["train_size"] == 70


def test_verifying_finds_a_set_that_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Digits().load(Path(), seed=1)
    cut: tuple[Samples, Samples] = (whole[0].subset(1000), whole[1])
    monkeypatch.setattr(Digits, "load", lambda _self, _data_dir, *, seed: cut)
    answer = invoke("data", "verify", "digits")
    assert answer.code == 3
    assert (
        "digits holds 1000 training and 450 test samples instead of 1347 training and 450 test samples" in answer.error
    )


def test_verifying_an_absent_set_fails_and_says_what_to_do(tmp_path: Path) -> None:
    answer = invoke("data", "verify", "cifar10", "--data-dir", str(tmp_path))
    assert answer.code == 3
    assert "`bench data prepare cifar10`" in answer.error
    assert "\n" not in answer.error


def test_a_download_that_fails_is_one_sentence(tmp_path: Path) -> None:
    answer = invoke("data", "prepare", "cifar10:url=http://127.0.0.1:9/", "--data-dir", str(tmp_path))
    assert answer.code == 3
    assert "127.0.0.1:9" in answer.error
    assert "digits" in answer.error
    assert "\n" not in answer.error


def test_a_sheet_shows_samples_of_every_class_before_and_after_augmentation(tmp_path: Path) -> None:
    out = tmp_path / "sheet"
    answer = invoke("data", "sheet", "synthetic:train_size=30,test_size=20,size=16", "--out", str(out))
    assert (answer.code, answer.error) == (0, f"wrote {out}\n")
    with Image.open(out) as sheet:
        assert sheet.size == (10 * (16 + 2), 3 * 14 + (3 + 2 + 4) * (16 + 2))  # gaps, headings
        colours = [len(sheet.crop((0, top, 180, top + 18)).getcolors(4000) or ()) for top in (14, 82, 132)]
    assert min(colours) > 50
    answer = invoke("data", "sheet", "stdlib", "--out", str(out))
    assert (answer.code, answer.error.count("\n")) == (2, 0)
    assert "stdlib has no images" in answer.error


@pytest.mark.parametrize("action", ["prepare", "verify", "sheet"])
def test_preparing_and_verifying_need_a_name(action: str) -> None:
    answer = invoke("data", action)
    assert answer.code == 2
    assert f"bench data {action} NAME" in answer.error


def test_an_unknown_action_is_refused_with_the_nearest_one() -> None:
    answer = invoke("data", "prepair", "cifar10")
    assert answer.code == 2
    assert "(did you mean 'prepare'?)" in answer.error


def test_an_unknown_data_set_is_refused_with_the_nearest_one() -> None:
    answer = invoke("data", "verify", "cifar11")
    assert answer.code == 2
    assert "(did you mean 'cifar10'?)" in answer.error
