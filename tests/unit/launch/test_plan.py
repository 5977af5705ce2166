"""Plans of runs: what is taken, the default collective and buckets, and notes for the user."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.plan import plan, with_ranks
from bench.models.base import Model
from bench.rank.trainer import learning_rate
from compressors.layer import layers_of
from gradwire.ddp.buckets import bucket_size, buckets_of

ASP, SSP = "async_server:mode=asp", "async_server"

TAKEN: list[dict[str, Any]] = [
    {"strategy": ASP},
    {"strategy": "async_server:root=1,staleness=3"},
    {"strategy": ASP, "collective": "server", "compressor": "topk"},
    {"strategy": ASP, "compressor": "terngrad"},
    {"strategy": ASP, "compressor": "hylo"},
    {"strategy": ASP, "optimizer": "max_adabelief:mode=gradient"},
    {"strategy": ASP, "optimizer": "adabelief"},
    {"strategy": ASP, "clip_norm": 1.0},
    {"strategy": "ddp", "collective": "server", "trigger": "sync", "bucket_mb": 1.0, "compressor": "powersgd"},
    {"strategy": "local", "collective": "server", "compressor": "dgc:momentum_correction=false"},
]


@pytest.mark.parametrize("choice", TAKEN, ids=[" ".join(map(str, choice.values())) for choice in TAKEN])
def test_taken(choice: dict[str, Any]) -> None:
    config = plan(RunConfig(**choice))
    assert (config.strategy, config.collective) == (choice["strategy"], "server")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("local", "sees the parameters of step 90 of 100, because no exchange follows; make --steps a multiple of 30"),
        ("local:steps=200,fragments=4", ""),
        (
            "local:start_after=80",
            "sees the parameters of step 80 of 100, because no exchange follows; make --steps a multiple of 30",
        ),
        (
            "local:steps=8,start_after=90",
            "sees the parameters of step 98 of 100, because no exchange follows; make --steps a mul",
        ),
        ("local:steps=120", "sees the parameters of step 0"),
        ("local:steps=10", ""),
        ("local:start_after=100", ""),
    ],
)
def test_steps_after_the_last_exchange_are_said_to_be_left_out(text: str, said: str) -> None:
    config = plan(RunConfig(strategy=text, steps=100))
    notes = [note for note in config.notes if "no exchange follows" in note]
    assert [said in note for note in notes] == [True] * bool(said)


@pytest.mark.parametrize(("first", "is_told"), [(99, False), (100, True), (101, True)])
def test_a_run_that_ends_before_local_steps_begin_is_told(first: int, *, is_told: bool) -> None:
    config = plan(RunConfig(strategy=f"local:steps=1,start_after={first}", steps=100))
    said = f"local steps begin only after step {first}, and the run ends at step 100, so gradients are averaged"
    assert any(note.startswith(said) for note in config.notes) == is_told


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        (
            "iid",
            ["step 0 of 36, because no exchange follows; change --epochs, or set steps to a number that divides 36"],
        ),
        ("classes:per_rank=5", []),  # the number of steps is not known
    ],
)
def test_epochs_are_counted_in_steps(partition: str, said: list[str]) -> None:
    sizes: dict[str, Any] = {"train_size": 1240, "holdout_size": 40, "world_size": 2, "batch_size": 16, "accumulate": 2}
    config = plan(RunConfig(strategy="local:preset=diloco", epochs=2, partition=partition, **sizes))
    notes = [note.partition("parameters of ")[2] for note in config.notes if "no exchange follows" in note]
    assert notes == said


def test_a_collective_of_local_steps_may_need_all_ranks() -> None:
    assert plan(RunConfig(strategy="local", collective="server:root=1")).collective == "server:root=1"


def test_a_preset_of_local_steps_gives_way_to_options() -> None:
    config = plan(RunConfig(strategy="local:preset=diloco,outer_lr=0.5,steps=20", epochs=1))
    assert config.strategy == "local:outer_lr=0.5,preset=diloco,steps=20"
    assert (
        "nesterov=true,outer_lr=0.5,outer_momentum=0.9,preset=diloco,seconds=2,start_after=0,steps=20"
        in (config.filled["strategy"])
    )


@pytest.mark.parametrize(
    "choice",
    [
        {"clip_norm": 1.0, "compressor": "dgc:momentum_correction=false"},
        {"clip_norm": 1.0, "strategy": "local:preset=post_local", "collective": "server"},
        {"strategy": "local:preset=sparseloco", "compressor": "group_topk"},
        {"strategy": "local:preset=streaming,fragments=2", "optimizer": "adabelief", "accumulate": 2},
        {"clip_norm": 1.0, "compressor": "torch_powersgd"},
        {"clip_norm": 1.0, "optimizer": "max_adabelief:mode=gradient"},
        {"clip_norm": 1.0, "optimizer": "kfac"},
        {"lr_scaling": "linear:gradual=true", "warmup_epochs": 5.0},
    ],
)
def test_clipping_and_gradual_scaling_are_taken_where_they_have_a_meaning(choice: dict[str, Any]) -> None:
    plan(RunConfig(**choice))


def test_a_pool_finds_the_largest_variance() -> None:
    config = plan(RunConfig(collective="pool", optimizer="max_adabelief:reduce=s_max"))
    assert (config.collective, config.optimizer) == ("pool", "max_adabelief:reduce=s_max")


def test_every_option_of_a_strategy_identifies_the_run() -> None:
    configs = [plan(RunConfig(strategy=text)) for text in (SSP, "async_server:staleness=1", ASP)]
    assert configs[0].filled["strategy"] == "async_server:mode=ssp,root=0,staleness=0"
    assert len({config.config_id for config in configs}) == len(configs)


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="use --device cpu"):
        plan(RunConfig(strategy=ASP))


@pytest.mark.parametrize(
    ("choice", "bucket_mb"),
    [
        ({"model": "resnet18", "dataset": "synthetic", "optimizer": "max_adabelief"}, None),
        ({"model": "small_cnn"}, 1.0),
        ({"model": "resnet18", "dataset": "synthetic"}, 18.33),
        ({"model": "resnet50", "dataset": "synthetic"}, 25.0),
        ({"model": "resnet50:stem=imagenet", "dataset": "synthetic:size=224,classes=1000"}, 25.0),
        ({"model": "resnet18", "dataset": "synthetic", "bucket_mb": 3.0}, 3.0),
        ({"strategy": "async_server"}, None),
        ({"model": "resnet18", "dataset": "synthetic", "compressor": "group_topk:preset=patent"}, 42.63),
        ({"model": "resnet18", "dataset": "synthetic", "compressor": "group_topk:scope=model", "bucket_mb": 50.0}, 50),
        ({"model": "resnet18", "dataset": "synthetic", "compressor": "group_topk:preset=patent,scope=bucket"}, 18.33),
    ],
    ids=str,
)
def test_buckets_follow_the_size_of_the_model(choice: dict[str, Any], bucket_mb: float | None) -> None:
    chosen = plan(RunConfig(**choice)).bucket_mb
    assert chosen == (None if bucket_mb is None else pytest.approx(bucket_mb, rel=1e-3))


@pytest.mark.parametrize(
    ("model", "shares"),
    [
        ("resnet18", [0.435, 0.478, 0.087]),  # a quarter of the model would leave 0.248, and a third 0.196
        ("resnet56", [0.478, 0.456, 0.066]),
        ("gpt", [0.428, 0.468, 0.104]),
        ("resnet34", [0.333, 0.311, 0.293, 0.063]),
        ("small_cnn", [1.0]),  # below 1 MiB
    ],
)
def test_buckets_are_few_and_the_last_one_is_small(model: str, shares: list[float]) -> None:
    with torch.device("meta"):
        layers = layers_of(cast(Model, spec.build("models", model)).build(10))
    buckets = buckets_of(layers, bucket_size(layers))
    sizes = [sum(layer.numel for layer in bucket) for bucket in buckets]
    assert [size / sum(sizes) for size in sizes] == pytest.approx(shares, abs=1e-3)


@pytest.mark.parametrize("model", ["resnet20", "gpt"])
def test_buckets_are_those_of_ddp(model: str) -> None:
    layers = layers_of(cast(Model, spec.build("models", model)).build(10))
    backwards = [cast(torch.Tensor, layer.weight) for layer in reversed(layers)]
    limit_mb = bucket_size(layers) / 3
    of_ddp, _ = dist._compute_bucket_assignment_by_size(backwards, [int(limit_mb * 2**20)])
    assert [len(bucket) for bucket in buckets_of(layers, limit_mb)] == [len(bucket) for bucket in of_ddp]
    assert len(of_ddp) > 2


def test_a_bucket_too_small_for_the_whole_model_is_refused() -> None:
    asked = RunConfig(model="small_cnn", compressor="group_topk:scope=model,group_size=512", bucket_mb=0.1)
    with pytest.raises(
        UsageError,
        match=r"and --bucket-mb 0\.1 is too small for it; leave out --bucket-mb, or use --bucket-mb 0\.7369",
    ):
        plan(asked)
    chosen = plan(dataclasses.replace(asked, bucket_mb=None))
    assert with_ranks(chosen, 3).bucket_mb == chosen.bucket_mb == 0.7369  # a recorded value is not refused


@pytest.mark.parametrize(
    ("compressor", "given", "scaling", "says"),
    [
        ("group_topk:preset=patent", None, "linear", "0.1 x 4 ranks = 0.4"),
        ("group_topk:preset=patent,group_size=512", "linear:base=2", "linear:base=2", ""),
        ("group_topk:preset=patent", "none", "none", ""),
        ("group_topk", None, "none", ""),
        ("none", "linear", "linear", ""),
    ],
)
def test_the_learning_rate_follows_the_ranks_as_the_document_has_it(
    compressor: str, given: str | None, scaling: str, says: str
) -> None:
    config = plan(RunConfig(compressor=compressor, lr=0.1, lr_scaling=given, world_size=4))  # type: ignore[arg-type]
    assert config.lr_scaling == scaling
    peak = learning_rate(config, 0, 100, 10)
    assert peak == pytest.approx(0.1 * {"linear": 4, "linear:base=2": 2, "none": 1}[scaling], rel=1e-3)
    notes = [note for note in config.notes if "scales the learning rate" in note]
    assert [says in note for note in notes] == [True] * bool(says)
