"""RunConfig: what identifies an experiment, and that a configuration survives the way to the ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench.core.config import RunConfig
from bench.core.errors import UsageError
from bench.core.schema import METRICS_BY_NAME
from tests.configs import make_config

LABELS_AND_PLACES: dict[str, Any] = {
    "name": "another",
    "data_dir": "/elsewhere",
    "nnodes": 2,
    "node_rank": 1,
    "rdzv_endpoint": "host:1",
    "timeout_s": 1.0,
    "profile": 5,
    "save_model": True,
}
IDENTITY: dict[str, Any] = {
    "trigger": "sync",
    "world_size": 3,
    "batch_size": 8,
    "epochs": 2,
    "steps": 7,
    "lr": 0.2,
    "schedule": "constant",
    "warmup_epochs": 1.0,
    "lr_scaling": "linear",
    "target_accuracy": 0.9,
    "eval_every": 5,
    "train_size": 60,
    "test_size": 30,
    "augment": False,
    "amp": "bf16",
    "device": "cuda",
    "threads": 2,
    "bucket_mb": 1.0,
    "warmup_steps": 0,
    "nonfinite": "raise",
    "hosts": 2,
    "ranks_per_host": 1,
    "uplink_bps": 1e8,
    "downlink_bps": 1e8,
    "latency_s": 0.01,
}
COMPONENTS = ("model", "dataset", "optimizer", "compressor", "collective")


def test_every_field_is_either_identity_or_not() -> None:
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    only_one_value = {"partition"}
    assert fields == {*LABELS_AND_PLACES, *IDENTITY, *COMPONENTS, *only_one_value, "filled", "seed"}


@pytest.mark.parametrize("field", LABELS_AND_PLACES)
def test_labels_and_places_do_not_identify_an_experiment(field: str) -> None:
    changed = make_config(**{field: LABELS_AND_PLACES[field]})
    assert changed != make_config()
    assert changed.digest == make_config().digest


@pytest.mark.parametrize("field", IDENTITY)
def test_everything_else_does(field: str) -> None:
    changed = make_config(**{field: IDENTITY[field]})
    assert changed.digest != make_config().digest
    assert changed.config_id != make_config().config_id


def test_a_components_defaults_count_though_its_short_text_hides_them() -> None:
    filled = make_config().filled
    old, new = (make_config(filled=filled | {"optimizer": f"sgd:momentum={value}"}) for value in ("0.9", "0.8"))
    assert old.optimizer == new.optimizer
    assert old.digest != new.digest


def test_a_short_text_alone_changes_nothing() -> None:
    assert make_config(optimizer="sgd:momentum=0.9").digest == make_config().digest


def test_seeds_share_a_config_id_but_no_digest() -> None:
    first, second = make_config(seed=1), make_config(seed=2)
    assert first.config_id == second.config_id
    assert first.digest != second.digest
    assert first.config_id not in (first.digest, second.digest)


def test_a_digest_is_ten_hex_digits_and_stays_the_same() -> None:
    assert make_config().digest == make_config().digest
    assert len(make_config().digest) == 10
    int(make_config().digest, 16)


def test_json_brings_the_same_configuration_back(tmp_path: Path) -> None:
    config = make_config(**(LABELS_AND_PLACES | IDENTITY))
    path = tmp_path / "config.json"
    path.write_text(config.to_json(), encoding="utf-8")
    assert RunConfig.from_json(path) == config
    assert RunConfig.from_json(path).digest == config.digest


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"unknown": 1}'])
def test_a_file_that_is_no_configuration_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"is not a run's config.json"):
        RunConfig.from_json(path)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        RunConfig.from_json(tmp_path / "config.json")


def test_columns_are_the_schemas_identity_columns() -> None:
    columns = make_config().columns()
    identity = {name for name, column in METRICS_BY_NAME.items() if column.group == "identity"}
    assert set(columns) == (identity | {"target_accuracy"}) - {"run_id"}
    assert columns["digest"] == make_config().digest
    assert columns["optimizer"] == "sgd"


def test_a_configuration_is_plain_json_and_cannot_change() -> None:
    config = make_config()
    assert json.loads(config.to_json())["batch_size"] == 32
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 2  # type: ignore[misc]
