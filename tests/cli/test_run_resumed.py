"""A run that loses a rank and is resumed: its rows equal those of an undisturbed run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from bench.core.columns import Column
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.files import locked
from bench.core.run_folder import RunFolder, write_json
from bench.core.schema import LAYERS, METRICS
from bench.launch.plan import with_ranks
from bench.launch.run import change_ranks, configuration_of, prepare_folder
from tests.testing.checkpoints import add_checkpoint
from tests.testing.configs import make_config
from tests.testing.invoke import execute, invoke, only_run, rows, status
from tests.testing.plugins import install

# Three ranks and several buckets; the rounding of the sums depends on the order of the layers in the buckets.
RUN = (
    "run", "--model", "small_cnn", "--train-size", "192", "--test-size", "32", "--batch-size", "8", "--steps", "10",
    "--eval-every", "4", "--checkpoint-every", "3", "--world-size", "3", "--bucket-mb", "0.05", "--compressor",
    "mortal:ratio=0.05", "--collective", "ring",
)  # fmt: skip


def repeating(folder: Path, name: str, columns: tuple[Column, ...]) -> list[dict[str, str]]:
    names = [column.name for column in columns if column.deterministic and column.group != "origin"]
    return [{name: row[name] for name in names} for row in rows(folder, name)]


def test_a_run_that_lost_a_rank_goes_on_from_its_checkpoint_as_if_it_had_not(tmp_path: Path) -> None:
    told = {"PYTHONPATH": install(tmp_path), "MORTAL": str(tmp_path / "was-killed")}
    killed = execute(*RUN, "--out", str(tmp_path / "killed"), **told)
    folder = only_run(tmp_path / "killed")
    assert killed.code == 3
    assert "rank 1 was killed by SIGKILL" in killed.error
    # The checkpoint of step 3 was complete before that of step 6 was begun.
    assert re.search(rf"to resume from step [36]: bench run --resume {folder}", killed.error)
    resumed = execute("run", "--resume", str(folder), "--timeout", "77", **told)
    assert resumed.code == 0, resumed.error
    undisturbed = execute(*RUN, "--out", str(tmp_path / "undisturbed"), **told)
    assert undisturbed.code == 0, undisturbed.error
    other = only_run(tmp_path / "undisturbed")
    assert [row["step"] for row in rows(folder)] == ["4", "8", "10"]
    for name, columns in (("metrics.csv", METRICS), ("layers.csv", LAYERS)):
        assert repeating(folder, name, columns) == repeating(other, name, columns)
    assert [row["resumes"] for row in rows(folder)][1:] == ["1", "1"]
    assert status(folder)["status"] == "ok"
    assert RunConfig.from_json(folder / "config.json").timeout_s == 77  # an option that does not affect the training
    assert not (folder / "checkpoints").exists()  # no checkpoint is needed after the end
    assert "is complete, so there is nothing to resume" in invoke("run", "--resume", str(folder)).error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--epochs", "3"), "leave out --epochs"),
        (("--lr", "0.1", "--seeds", "1,2"), "leave out --lr and --seeds"),
        ((), "is not a run folder (it holds no config.json); give one below results/runs"),
    ],
)
def test_a_resumed_run_takes_nothing_else(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    answer = invoke("run", "--resume", str(tmp_path), *arguments)
    assert answer.code == 2
    assert sentence in answer.error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--world-size", "3"),
            "had 2 ranks, each with residuals that it had not sent; choose one: --resume-residuals sum",
        ),
        (
            ("--resume-residuals", "sum"),
            "is for a run that resumes with another number of ranks than before, which was 2; give another",
        ),
        (
            ("--world-size", "2", "--resume-residuals", "drop"),
            "is for a run that resumes with another number of ranks than before, which was 2",
        ),
    ],
)
def test_another_number_of_ranks_must_say_what_becomes_of_what_waits(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    config = make_config(checkpoint_every=1)
    folder = RunFolder.create(tmp_path, "test", config.digest, 1)
    add_checkpoint(folder, config, step=1)
    answer = invoke("run", "--resume", str(folder.path), *arguments)
    assert answer.code == 2
    assert sentence in answer.error


@pytest.mark.parametrize("through", ["the working directory", "a link"])
def test_a_run_is_known_by_its_folder_whichever_way_leads_there(
    through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(checkpoint_every=1)
    folder = RunFolder.create(tmp_path, "test", config.digest, 1)
    add_checkpoint(folder, config, step=1)
    (tmp_path / "latest").symlink_to(folder.path)
    monkeypatch.chdir(folder.path)
    path = "." if through == "the working directory" else str(tmp_path / "latest")
    assert "had 2 ranks" in invoke("run", "--resume", path, "--world-size", "3").error


def test_a_run_that_is_under_way_is_not_said_to_have_no_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "test", make_config().digest, 1)
    write_json(folder.config, dataclasses.asdict(make_config(checkpoint_every=1)))
    with locked(folder.path):
        answer = invoke("run", "--resume", str(folder.path))
    assert (answer.code, answer.error) == (2, f"the run in {folder.path} is still running; wait until it ends")
    assert "holds no checkpoint; start the run again" in invoke("run", "--resume", str(folder.path)).error


def test_other_ranks_go_on_with_a_configuration_of_their_own(tmp_path: Path) -> None:
    config = make_config(checkpoint_every=1, batch_size=16)
    folder = RunFolder.create(tmp_path, "test", config.digest, 1)
    add_checkpoint(folder, config, step=1)
    changed = with_ranks(config, 3)
    assert (changed.world_size, changed.replicas) == (3, 3)
    change_ranks(folder, changed, "sum")
    prepare_folder(folder)
    assert configuration_of(folder) == changed  # although the checkpoint is still one of two ranks
    assert RunConfig.from_json(folder.path / "config-before-1.json") == config


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": "max_adabelief"}, "max_adabelief keeps different moments on every rank"),
        ({"compressor": "torch_powersgd"}, "torch_powersgd keeps its state in a hook of DDP"),
        ({"collective": "server:placement=sharded"}, "server:placement=sharded keeps a part of every layer on each"),
        ({"batch_size": 30}, "--batch-size 30 is larger than a rank's shard of 21 samples"),
    ],
)
def test_what_other_ranks_could_not_go_on_with_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        with_ranks(make_config(**changes), 3)
