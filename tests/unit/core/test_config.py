"""RunConfig: the options that identify an experiment, and the transfer of a configuration to the ranks."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

from bench.core.config.configuration import CommandOption, Configuration
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.run_folder import write_json
from bench.core.schema import METRICS_BY_NAME
from tests.testing.configs import COMPONENTS, make_config

# The full texts of the components in `filled` count.
# Labels, paths, options that only observe a run, and texts whose numbers other fields hold.
NO_IDENTITY = {
    "name",
    "recipe",
    "rates_tried",
    "data_dir",
    "nnodes",
    "node_rank",
    "rdzv_endpoint",
    "timeout_s",
    "profile",
    "save_model",
    "checkpoint_every",
    "max_restarts",
    "network",
    "bandwidth",
    "uplink",
    "downlink",
    "bandwidth_trace",
    "uplink_trace",
    "downlink_trace",
    "latency",
    "jitter",
    "loss",
    "cluster_file",
    "cluster",
    "replicas",
    "track",
    "notes",
}
FIELDS = {option.name: option for option in RunConfig.options()}
# values that need a certain form
VALUES = {
    "notes": ("something",),
    "straggler": "rank=1,slowdown=3",
    "lr_scaling": "linear:base=2",
    "label_smoothing": 0.1,
    "partition": "dirichlet:alpha=0.5",
    "rdzv_endpoint": "host0:29500",
}


def other(option: CommandOption) -> Any:
    """Return an allowed value of the option that differs from that of `make_config`."""
    now = getattr(make_config(), option.name)
    if typing.get_origin(option.value_type) is typing.Literal:
        return next(choice for choice in typing.get_args(option.value_type) if choice != now)
    if option.name in ("cluster", "devices"):
        return {"hosts": []}
    if option.cell_type is bool:
        return not now
    if option.name in VALUES:
        return VALUES[option.name]
    return "another" if option.cell_type is str else (now or 0) + option.cell_type(1)


@pytest.mark.parametrize("field", sorted(NO_IDENTITY))
def test_labels_and_places_do_not_identify_an_experiment(field: str) -> None:
    changed = make_config(**{field: other(FIELDS[field])})
    assert changed != make_config()
    assert changed.digest == make_config().digest


@pytest.mark.parametrize("field", sorted(FIELDS.keys() - NO_IDENTITY - COMPONENTS.keys() - {"filled", "seed"}))
def test_everything_else_does(field: str) -> None:
    changed = make_config(**{field: other(FIELDS[field])})
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
    write_json(path, dataclasses.asdict(config))
    assert RunConfig.from_json(path) == config
    assert RunConfig.from_json(path).digest == config.digest


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"unknown": 1}'])
def test_a_file_that_is_no_configuration_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="holds no RunConfig"):
        RunConfig.from_json(path)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        RunConfig.from_json(tmp_path / "config.json")


def test_columns_are_the_schemas_identity_columns() -> None:
    columns = make_config().columns()
    identity = {name for name, column in METRICS_BY_NAME.items() if column.group == "identity"}
    assert set(columns) == identity - {"run_id"}
    assert columns["digest"] == make_config().digest
    assert columns["optimizer"] == "sgd"


def assert_complete(configuration: type[Configuration]) -> None:
    """Fail unless identity is recorded in columns, every option has a meaning, and every number a range."""
    for option in configuration.options():
        assert option.recorded.identity <= option.recorded.column, option.name
        assert option.meaning, option.name
        if option.flag and option.cell_type in (int, float):
            assert option.range, option.name


def test_options_are_complete() -> None:
    assert_complete(RunConfig)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "--batch-size 0 is not possible: give 1 or more"),
        ({"lr": float("nan")}, "--lr nan is not possible: give a finite number"),
        ({"warmup_epochs": float("inf")}, "--warmup-epochs inf is not possible"),
        ({"timeout_s": 0.5}, "--timeout 0.5 is not possible"),
        ({"trigger": "never"}, "--trigger never is not possible: give async or sync"),
        ({"epochs": "three"}, "--epochs three is not possible: give a whole number"),
        ({"augment": None}, "--augment None is not possible"),
        ({"name": "a/b"}, "--name 'a/b' cannot be part"),
        ({"lr_scaling": "linear:base=0"}, "--lr-scaling linear:base=0 is not possible"),
        ({"lr_scaling": "square"}, "--lr-scaling square is not possible"),
        ({"lr_scaling": "linear:"}, "--lr-scaling linear: is not possible"),
        ({"lr_scaling": "linear:gradual=maybe"}, "--lr-scaling linear:gradual=maybe is not possible"),
        ({"lr_scaling": "none:gradual=true"}, "--lr-scaling none:gradual=true is not possible"),
        ({"clip_norm": -1.0}, "--clip-norm -1.0 is not possible: give 0 or more"),
        ({"label_smoothing": 1.0}, "--label-smoothing 1.0 is not possible: give less than 1"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_its_flag(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make_config(**options)


def test_texts_are_written_in_one_way() -> None:
    config = make_config(lr_scaling=" linear : base = 1 ", straggler="rank=1, slowdown=3.0")
    assert (config.lr_scaling, config.straggler) == ("linear", "rank=1,slowdown=3")
    assert config.digest == make_config(lr_scaling="linear", straggler="rank=1,slowdown=3").digest


def test_a_scaling_of_the_rate_is_written_in_one_way() -> None:
    texts = ("linear:gradual=true", "linear:base=1,gradual=true", " linear: gradual = true, base=1")
    assert {make_config(lr_scaling=text).lr_scaling for text in texts} == {"linear:gradual=true"}
    assert make_config(lr_scaling="linear:gradual=true,base=4").lr_scaling == "linear:base=4,gradual=true"
    assert make_config(lr_scaling="linear:gradual=false").lr_scaling == "linear"


def test_only_what_was_not_given_is_chosen() -> None:
    chosen = RunConfig(eval_every=0).choose(eval_every=1, lr=0.5)
    assert (chosen.eval_every, chosen.lr) == (0, 0.5)


def test_a_configuration_is_plain_json_and_cannot_change() -> None:
    config = make_config()
    assert dataclasses.asdict(config)["batch_size"] == 32
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 2  # type: ignore[misc]
