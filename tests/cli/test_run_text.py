"""`bench run` on a text: bits per byte beside yardsticks, two equal runs, a text that has changed, and refusals."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import pytest

from bench.core import registry, spec
from bench.core.run_folder import RunFolder
from tests.testing.checkpoints import add_checkpoint
from tests.testing.configs import COMPONENTS, make_config
from tests.testing.invoke import Answer, execute, invoke, only_run, rows

FILES = Path(sysconfig.get_path("stdlib")) / "json"

pytestmark = pytest.mark.usefixtures("forked_here", "own_cache")


def run(folder: Path, out: Path, *arguments: str) -> Answer:
    return invoke(
        "run", "--dataset", f"text:path={folder},context=32", "--model", "gpt:layers=1,width=16,heads=2",
        "--optimizer", "adamw", "--batch-size", "4", "--steps", "4", "--eval-every", "2", "--compressor", "topk",
        "--threads", "1", "--out", str(out), *arguments,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for file in FILES.glob("*.py"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_one_seed_trains_twice_alike_and_yardsticks_stand_beside_it(folder: Path) -> None:
    for out in ("first", "second"):
        answer = run(folder, folder / out)  # results are not part of the text
        assert answer.code == 0, answer.error
    first, second = (rows(only_run(folder / out)) for out in ("first", "second"))
    assert [row["step"] for row in first] == ["2", "4"]
    for row, again in zip(first, second, strict=True):
        assert float(row["test_bits_per_byte"]) == pytest.approx(float(row["test_loss"]) / math.log(2))
        assert 0 < float(row["xz_bits_per_byte"]) < float(row["test_bits_per_byte"]) < 8.2
        assert f"path={folder}" in row["dataset"]
        assert "hash=" in row["dataset"]
        assert row["replicas_in_sync"] == "true"
        for column in ("digest", "train_loss", "test_bits_per_byte", "test_accuracy", "gzip_bits_per_byte"):
            assert row[column] == again[column]


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [
        text
        for text in ("async_server", "local:steps=5", "placed:by=data,devices=examples/cxl.toml")
        if spec.parse(text).name in registry.entries("strategies")
    ],
)
def test_a_transformer_trains_with_every_strategy(strategy: str, folder: Path, tmp_path: Path) -> None:
    answer = run(folder, tmp_path / "out", "--strategy", strategy, "--steps", "20", "--eval-every", "10")
    assert answer.code == 0, answer.error
    first, last = rows(only_run(tmp_path / "out"))
    assert last["step"] == "20"
    assert float(last["test_bits_per_byte"]) < float(first["test_bits_per_byte"]) < 8
    assert last["replicas_in_sync"] == "true"


@pytest.mark.long
def test_a_run_is_not_resumed_with_a_text_that_has_changed(folder: Path, tmp_path: Path) -> None:
    dataset = f"text:path={folder},context=32"
    filled = COMPONENTS | {"dataset": spec.full_text(spec.build("datasets", dataset))}
    config = make_config(dataset=dataset, filled=filled, checkpoint_every=1, world_size=1, replicas=1, ranks_per_host=1)
    run_folder = RunFolder.create(tmp_path / "out", "test", config.digest, 1)
    add_checkpoint(run_folder, config, step=1)
    with (folder / "decoder.py").open("a") as file:
        file.write("# changed")
    answer = execute("run", "--resume", str(run_folder.path))
    assert answer.code != 0
    assert "so it has changed; restore it, or leave out hash and start a new run" in answer.error
    assert "Traceback" not in answer.error


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--dataset", "text:path=/nowhere", "--model", "gpt"), "there is no folder /nowhere; give a folder of text f"),
        (
            ("--dataset", "stdlib:context=256", "--model", "gpt"),
            "gpt has context=128, and the data set's context=256 is longer; give gpt:context=256, or give the data set "
            "context=128",
        ),
        (("--dataset", "stdlib"), "use a model that predicts bytes, such as --model gpt"),
        (("--model", "gpt"), "gpt predicts the bytes of a text, which this data set is not; use --dataset stdlib"),
    ],
)
def test_a_model_and_data_that_do_not_fit_are_refused(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    answer = invoke("run", *arguments, "--steps", "2", "--out", str(tmp_path / "out"))
    assert answer.code == 2
    assert sentence in answer.error
    assert "\n" not in answer.error
    assert not (tmp_path / "out").exists()
