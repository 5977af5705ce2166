"""Methods and studies as users write them."""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest

from bench.core.config.run import RunConfig
from bench.core.errors import NothingToCompare, UsageError
from bench.deciding.api import decide
from bench.deciding.search import Search
from bench.deciding.study import (
    Method,
    Study,
    notes_of,
    parse_method,
    read_methods,
    short_names,
    train_missing,
)
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.plan import plan
from bench.launch.sweep_file import Settings


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("powersgd", {"compressor": "powersgd"}),
        ("topk:ratio=0.01@allgather", {"compressor": "topk:ratio=0.01", "collective": "allgather"}),
        ("local:steps=4  muon topk", {"strategy": "local:steps=4", "optimizer": "muon", "compressor": "topk"}),
        ("topk:ratio=0.1, skip=norm @ ring", {"compressor": "topk:ratio=0.1, skip=norm", "collective": "ring"}),
    ],
)
def test_a_method_names_components_and_perhaps_a_collective(text: str, settings: Settings) -> None:
    assert parse_method(text) == settings


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not a method; write a compressor, strategy or optimizer"),
        ("@ring", "is not a method"),
        ("topk@", "is not a method"),
        ("topk@ring muon", "the collective last"),
        ("topk bf16", "names two compressors, topk and bf16; a method has one"),
        ("loc", r"there is no compressor, strategy or optimizer 'loc' \(did you mean 'local'\?\); `bench list` shows"),
        ("topk:ratio=0.1 muom", r"no compressor, strategy or optimizer 'muom' \(did you mean 'muon'\?\)"),
        ("diloco", r"'diloco' \(diloco is a preset of a strategy: local:preset=diloco\); `bench list`"),
    ],
)
def test_a_wrong_method_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_method(text)


def test_a_single_text_is_one_method() -> None:
    with pytest.raises(UsageError, match="'topk bf16' names two compressors"):
        decide("topk bf16", target_accuracy=0.9)


def test_a_file_names_methods_as_a_sweep_file_does(tmp_path: Path) -> None:
    path = tmp_path / "methods.toml"
    path.write_text('[base]\nepochs = 3\n[[method]]\ncompressor = "topk"\nlr = 0.1\n', encoding="utf-8")
    assert read_methods(path) == ({"epochs": 3}, [{"compressor": "topk", "lr": 0.1}])
    path.write_text('[base]\nseeds = "1-3"\n[[method]]\ncompressor = "topk"\n', encoding="utf-8")
    with pytest.raises(UsageError, match="names seeds, but bench decide adds seeds"):
        read_methods(path)


def test_the_link_does_not_change_the_digest_of_a_study(tmp_path: Path) -> None:
    methods: list[Settings] = [{"compressor": "bf16"}, {"compressor": "topk"}]
    rule = {"alpha": 0.05, "same": 1.03, "accuracy_margin": 0.01}
    here, there = (
        Study(base={"epochs": 3, "hosts": 2, "bandwidth": rate}, methods=methods, rule=rule)
        for rate in ("1mbit", "2mbit")
    )
    assert here.digest == there.digest != Study(base={"epochs": 4}, methods=methods, rule=rule).digest
    here.store(tmp_path)
    assert Study.read(tmp_path) == here
    with pytest.raises(UsageError, match=r"holds no study\.json of this version; give a folder of bench decide"):
        Study.read(tmp_path / "other")
    (tmp_path / "study.json").write_text('{"base": {}, "runs": []}', encoding="utf-8")
    with pytest.raises(UsageError, match="of this version"):
        Study.read(tmp_path)


@pytest.mark.parametrize(
    ("base", "method", "sentence"),
    [
        ({}, {}, "needs a target"),
        ({"target_accuracy": 0.9}, {"steps": 5}, "leave out --steps"),
        ({"target_accuracy": 0.9, "nnodes": 2}, {}, "cannot use several machines"),
        ({"target_accuracy": 0.9, "node_rank": 1}, {}, "cannot use several machines"),
        ({"target_accuracy": 0.9, "rdzv_endpoint": "a:1"}, {}, "cannot use several machines"),
        ({"target_accuracy": 0.9}, {"bandwidth": "1mbit"}, "all methods must share bandwidth"),
        ({"target_accuracy": 0.9}, {"target_accuracy": 0.8}, "all methods must share target_accuracy"),
    ],
)
def test_options_that_allow_no_decision_are_refused(base: Settings, method: Settings, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Study(base=base, methods=[{}, method], rule={}).check()


@pytest.mark.usefixtures("planned_here")
def test_the_hosts_of_the_link_share_the_samples_of_a_recipe() -> None:
    base = {"recipe": "resnet20-cifar10", "hosts": 4, "bandwidth": "50mbit", "target_accuracy": 0.9}
    study = Study(base=base, methods=[{"compressor": "bf16"}, {"compressor": "topk"}], rule={})
    study.check()
    with ForkServer(TRAIN) as server:
        methods = study.plan(server)
    for method in methods:
        assert (method.trajectory.world_size, method.trajectory.batch_size) == (4, 32)
        assert (method.on_link.model, method.on_link.batch_size, method.on_link.epochs) == ("resnet20", 32, 164)


@pytest.mark.usefixtures("planned_here")
def test_a_method_is_named_after_its_strategy_and_optimizer() -> None:
    methods: list[Settings] = [
        {"compressor": "bf16"},
        {"strategy": "local:preset=diloco"},
        {"strategy": "local:preset=sparseloco", "compressor": "topk"},
        {"compressor": "topk"},
        {"compressor": "bf16", "optimizer": "muon"},
        {"compressor": "none", "optimizer": "demo:k=8"},
    ]
    with ForkServer(TRAIN) as server:
        planned = Study(base={"model": "small_cnn"}, methods=methods, rule={}).plan(server)
    assert [method.name for method in planned] == [
        "bf16",
        "local",
        "local topk",
        "topk",
        "muon bf16",
        "demo",
    ]
    # topk sends more in its first epochs
    assert [method.exchanges_alike for method in planned] == [False, True, False, False, False, False]
    by_steps = dataclasses.replace(planned[2].trajectory, epochs=None, steps=90)
    assert dataclasses.replace(planned[2], trajectory=by_steps).exchanges_alike


def test_notes_of_a_plan_are_each_said_once_with_the_methods_that_have_them() -> None:
    plans = {"bf16": ("of all",), "local": ("of all", "of two"), "local topk": ("of two", "of all", "of one")}
    configs = {name: RunConfig(notes=notes) for name, notes in plans.items()}
    methods = [Method(name=name, trajectory=config, on_link=config) for name, config in configs.items()]
    assert notes_of(methods) == ["of all", "local, local topk: of two", "local topk: of one"]


@pytest.mark.usefixtures("planned_here")
def test_a_decision_says_that_local_steps_would_exchange_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Search, "run", mock.Mock(side_effect=NothingToCompare("planned")))
    for quiet in (False, True):
        with pytest.raises(NothingToCompare):
            decide(
                ["local:steps=100"], out=tmp_path, quiet=quiet, model="linear", train_size=400, epochs=4,
                world_size=2, target_accuracy=0.3,
            )  # fmt: skip
        note = "note: local: the last evaluation sees the parameters of step 0 of 24, because no exchange follows"
        assert (note in capfd.readouterr().err) is not quiet


def test_strategies_whose_numbers_depend_on_time_are_known() -> None:
    assert not Study(base={"strategy": "ddp"}, methods=[{}], rule={}).is_time_dependent
    assert Study(base={}, methods=[{}, {"strategy": "async_server:staleness=1"}], rule={}).is_time_dependent
    assert Study(base={}, methods=[{}, {"strategy": "local:preset=post_local"}], rule={}).is_time_dependent
    assert Study(base={}, methods=[{}, {"strategy": "local:start_after=9"}], rule={}).is_time_dependent
    assert Study(base={}, methods=[{}, {"strategy": "local:steps=auto"}], rule={}).is_time_dependent
    assert Study(base={}, methods=[{}, {"strategy": "elastic:quorum=2"}], rule={}).is_time_dependent
    assert not Study(base={}, methods=[{}, {"strategy": "local:steps=9"}], rule={}).is_time_dependent


@pytest.mark.parametrize(
    ("components", "names"),
    [
        ([("bf16", "native"), ("topk:ratio=0.05", "ring")], ["bf16", "topk"]),
        ([("topk:ratio=0.1", "ring"), ("local:steps=5 topk:ratio=0.1", "ring")], ["topk", "local topk"]),
        ([("topk:ratio=0.1", "ring"), ("topk:ratio=0.2", "ring")], ["topk:ratio=0.1", "topk:ratio=0.2"]),
        ([("topk", "ring"), ("topk", "tree")], ["topk + ring", "topk + tree"]),
        ([("topk", "ring"), ("topk", "ring")], ["lr = 0.1", "lr = 0.2"]),
    ],
)
def test_a_method_has_the_shortest_name_that_is_unique(components: list[tuple[str, str]], names: list[str]) -> None:
    assert short_names(components, [{"lr": 0.1}, {"lr": 0.2}]) == names


@pytest.mark.parametrize(
    ("summary", "is_repeated"),
    [
        ({}, True),
        ({"status": "ok"}, False),
        ({"status": "failed", "error": "rank 1 was killed by SIGKILL"}, True),
        ({"status": "failed", "error": "the loss is nan", "error_kind": "Diverged"}, False),
    ],
)
def test_runs_that_failed_without_divergence_are_repeated(
    summary: dict[str, str], is_repeated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plan(RunConfig())
    folder = tmp_path / f"x-s1-{config.digest}"
    folder.mkdir()
    if summary:
        (folder / "status.json").write_text(json.dumps(summary), encoding="utf-8")
    executed: list[RunConfig] = []

    def execute(config: RunConfig, *_: object) -> mock.Mock:
        executed.append(config)
        return mock.Mock(status="ok")

    monkeypatch.setattr("bench.deciding.study.execute", execute)
    assert train_missing([config], tmp_path, mock.Mock(), lambda *_: None) is is_repeated
    assert executed == [config] * is_repeated


def test_a_study_of_a_text_has_one_target_in_bits_per_byte() -> None:
    study = Study(base={"target_bits_per_byte": 2.1}, methods=[{}, {}], rule={})
    study.check()
    assert study.quality.name == "bits_per_byte"
    with pytest.raises(UsageError, match="all methods must share target_bits_per_byte"):
        dataclasses.replace(study, methods=[{}, {"target_bits_per_byte": 2.0}]).check()
