"""RunConfig: what identifies an experiment, and that a configuration survives the way to the ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.core.config import RunConfig
from bench.core.errors import UsageError
from bench.core.schema import METRICS_BY_NAME
from tests.testing.configs import make_config

# Labels, places, and what only observes a run. Every other field identifies the experiment.
NO_IDENTITY = {
    "name",
    "data_dir",
    "nnodes",
    "node_rank",
    "rdzv_endpoint",
    "timeout_s",
    "profile",
    "save_model",
}
# Their full texts in `filled` count.
COMPONENTS = {"model", "dataset", "optimizer", "compressor", "collective", "strategy"}
FIELDS = {field.name for field in dataclasses.fields(RunConfig)} - COMPONENTS - {"filled", "seed"}
OTHER = "another value"  # a configuration is not checked again, so a text does for every field


@pytest.mark.parametrize("field", sorted(NO_IDENTITY))
def test_labels_and_places_do_not_identify_an_experiment(field: str) -> None:
    changed = make_config(**{field: OTHER})
    assert changed != make_config()
    assert changed.digest == make_config().digest


@pytest.mark.parametrize("field", sorted(FIELDS - NO_IDENTITY))
def test_everything_else_does(field: str) -> None:
    changed = make_config(**{field: OTHER})
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
    config = make_config(seed=7, lr=1 / 3, target_accuracy=0.9, steps=None, uplink_bps=1e8, augment=False)
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
