"""Strategies: refusals before any process starts, accepted options, and the default collective."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.resolve import resolve, with_ranks
from bench.models.base import Model
from bench.strategies.ddp import bucket_size, buckets_of
from bench.train.trainer import learning_rate
from compressors.layer import layers_of

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "locals"}, "there is no strategy 'locals' (did you mean 'local'?)"),
    ({"strategy": "local:steps=10,fragments=3"}, "local: fragments=3 does not divide steps=10; choose steps"),
    (
        {"strategy": "local:preset=streaming,delay=25"},
        "local: delay=25 is not below the 25 steps between two exchanges",
    ),
    ({"strategy": "local:nesterov=true"}, "local: nesterov=true needs a momentum; add outer_momentum=0.9"),
    (
        {"strategy": "local:preset=diloco", "compressor": "dgc"},
        "and outer_momentum=0.9 of local is a second one; use momentum_correction=false",
    ),
    (
        {"strategy": "local", "compressor": "dgc"},
        "dgc applies the optimizer's momentum to gradients, which local does not send; use momentum_correction=false",
    ),
    (
        {"strategy": "local", "compressor": "torch_fp16"},
        "hook of gradients, and local exchanges parameters; use another",
    ),
    (
        {"strategy": "local", "compressor": "auto"},
        "auto works through DDP's communication hook of gradients",
    ),
    ({"strategy": "local", "optimizer": "kfac"}, "kfac sends data of its own between all ranks, and with local a rank"),
    ({"strategy": "local", "optimizer": "max_adabelief"}, "max_adabelief sends data of its own between all ranks"),
    ({"strategy": "local", "optimizer": "zero_one_adam"}, "zero_one_adam sends data of its own between all ranks, and"),
    ({"strategy": "local", "trigger": "sync"}, "--trigger sync waits for all ranks in every step, which local does"),
    ({"strategy": "local", "bucket_mb": 1.0}, "--bucket-mb has no meaning with local, which sends each fragment as"),
    ({"strategy": "local:average=senders", "compressor": "topk", "collective": "ring"}, "use collective allgather"),
    ({"strategy": "local:clip=median"}, "clip=median needs the message of every rank, and native adds messages"),
    (
        {"strategy": "local:clip=median", "compressor": "powersgd", "collective": "allgather"},
        "clip=median needs messages that can be decoded one by one, and the ranks of powersgd encode together",
    ),
    (
        {"strategy": "local:preset=sparseloco"},
        "local: decay=0.95 (preset=sparseloco) needs a compressor with a residual, such as group_topk, and none k",
    ),
    (
        {
            "strategy": "local:decay=0.5",
            "compressor": "qsgd:error_feedback=true,bits=8",
            "collective": "ring:requantise=true",
        },
        "decay=0.5 does not reach the errors of sums that ring keeps; use decay=1, or collective allgather",
    ),
    (
        {"strategy": "local:decay=0.5", "compressor": "topk", "collective": "server:downlink=recode"},
        "that server keeps; use decay=1, or downlink=dense or downlink=union without error feedback",
    ),
    (
        {"strategy": "local:preset=streaming", "compressor": "group_topk:scope=model"},
        "wants the whole model as one message with these options, and fragments=4 divides it; use fragments=1",
    ),
    (
        {"strategy": "local:preset=streaming", "compressor": "hylo:importance=taylor"},
        "hylo reads the weights while it encodes, and with delay=5 they change meanwhile; use importance=l2",
    ),
    ({"strategy": "local:steps=often"}, "local: steps=often is not possible: give a whole number, or auto"),
    ({"strategy": "local:steps=90,fragments=45"}, "fragments=45 needs a model of as many blocks, and this one has"),
    ({"collective": "server:root=2"}, "server: root=2 is none of the 2 ranks"),
    ({"collective": "server:mode=asp"}, "server has no option 'mode'"),
    ({"compressor": "torch_fp16", "trigger": "sync"}, "torch_fp16 starts its own sends"),
    ({"model": "linear", "dataset": "synthetic:size=64"}, "use --model resnet50:stem=imagenet, or leave size out of"),
    ({"compressor": "torch_fp16", "optimizer": "max_adabelief"}, "exchanges something in their place; use another"),
    ({"bucket_mb": 1.0, "optimizer": "max_adabelief"}, "--bucket-mb has no meaning with max_adabelief, which sends no"),
    ({"compressor": "dgc", "optimizer": "max_adabelief"}, "max_adabelief has no momentum to hand over"),
    ({"clip_norm": 1.0, "compressor": "dgc"}, "dgc applies momentum before it sends, so no rank has the mean gradient"),
    ({"clip_norm": 1.0, "compressor": "topk:momentum_correction=true"}, "add momentum_correction=false to topk"),
    ({"clip_norm": 1.0, "optimizer": "max_adabelief"}, "max_adabelief exchanges moments, so no rank has the mean"),
    ({"clip_norm": 1.0, "optimizer": "kfac:inner=max_adabelief"}, "kfac exchanges moments, so no rank has the mean"),
    (
        {"compressor": "dgc", "optimizer": "muon"},
        "muon has no momentum to hand over to momentum_correction",
    ),
    ({"model": "linear", "optimizer": "muon"}, "muon updates hidden matrices, and this model has none besides its"),
    ({"model": "linear", "optimizer": "kfac:inner=muon"}, "muon updates hidden matrices, and this model has none"),
    ({"compressor": "topk", "optimizer": "dion"}, "which topk does not encode; use compressor none or bf16"),
    ({"clip_norm": 1.0, "optimizer": "dion"}, "so no rank has the mean gradient that --clip-norm limits"),
    (
        {"compressor": "bf16", "collective": "server:error_feedback=true", "optimizer": "dion"},
        "use downlink=dense or downlink=union without error feedback, or compressor none",
    ),
    ({"compressor": "bf16:min_numel=100,skip=conv", "optimizer": "dion"}, "use compressor bf16 without options"),
    (
        {"compressor": "bf16:error_feedback=true", "optimizer": "dion"},
        "so bf16:error_feedback=true has options without",
    ),
    ({"collective": "ring:requantise=true", "optimizer": "onebit_adam"}, "and compressor none sends no codes"),
    ({"lr_scaling": "linear:gradual=true"}, "rises during warm-up; add --warmup-epochs, such as 5"),
    ({"collective": "allgather", "optimizer": "max_adabelief:reduce=s_max"}, "use collective ring or reduce=mean"),
    (
        {"collective": "hierarchical:inter=allgather", "optimizer": "max_adabelief:reduce=s_max"},
        "hierarchical:inter=allgather gives a sum of terms; use collective ring or reduce=mean",
    ),
]
TAKEN: list[dict[str, Any]] = [
    {"strategy": "ddp", "collective": "server", "trigger": "sync", "bucket_mb": 1.0, "compressor": "powersgd"},
    {"strategy": "local", "collective": "server", "compressor": "dgc:momentum_correction=false"},
]


@pytest.mark.parametrize(("choice", "sentence"), REFUSALS, ids=[" ".join(map(str, c.values())) for c, _ in REFUSALS])
def test_refusal(choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        resolve(RunConfig(**choice))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("choice", TAKEN, ids=[" ".join(map(str, choice.values())) for choice in TAKEN])
def test_taken(choice: dict[str, Any]) -> None:
    config = resolve(RunConfig(**choice))
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
    config = resolve(RunConfig(strategy=text, steps=100))
    notes = [note for note in config.notes if "no exchange follows" in note]
    assert [said in note for note in notes] == [True] * bool(said)


@pytest.mark.parametrize(("first", "is_told"), [(99, False), (100, True), (101, True)])
def test_a_run_that_ends_before_local_steps_begin_is_told(first: int, *, is_told: bool) -> None:
    config = resolve(RunConfig(strategy=f"local:steps=1,start_after={first}", steps=100))
    said = f"local steps begin only after step {first}, and the run ends at step 100, so gradients are averaged"
    assert any(note.startswith(said) for note in config.notes) == is_told


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ("iid", ["step 0 of 36, because no exchange follows; change --epochs, or use steps that divide 36"]),
        ("classes:per_rank=5", []),  # the number of steps is not known
    ],
)
def test_epochs_are_counted_in_steps(partition: str, said: list[str]) -> None:
    sizes: dict[str, Any] = {"train_size": 1240, "holdout_size": 40, "world_size": 2, "batch_size": 16, "accumulate": 2}
    config = resolve(RunConfig(strategy="local:preset=diloco", epochs=2, partition=partition, **sizes))
    notes = [note.partition("parameters of ")[2] for note in config.notes if "no exchange follows" in note]
    assert notes == said


def test_a_collective_of_local_steps_may_need_all_ranks() -> None:
    assert resolve(RunConfig(strategy="local", collective="server:root=1")).collective == "server:root=1"


def test_a_preset_of_local_steps_gives_way_to_options() -> None:
    config = resolve(RunConfig(strategy="local:preset=diloco,outer_lr=0.5,steps=20", epochs=1))
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
    resolve(RunConfig(**choice))


def test_a_pool_finds_the_largest_variance() -> None:
    config = resolve(RunConfig(collective="pool", optimizer="max_adabelief:reduce=s_max"))
    assert (config.collective, config.optimizer) == ("pool", "max_adabelief:reduce=s_max")


@pytest.mark.parametrize(
    ("choice", "bucket_mb"),
    [
        ({"model": "resnet18", "dataset": "synthetic", "optimizer": "max_adabelief"}, None),
        ({"model": "small_cnn"}, 1.0),
        ({"model": "resnet18", "dataset": "synthetic"}, 18.33),
        ({"model": "resnet50", "dataset": "synthetic"}, 25.0),
        ({"model": "resnet50:stem=imagenet", "dataset": "synthetic:size=224,classes=1000"}, 25.0),
        ({"model": "resnet18", "dataset": "synthetic", "bucket_mb": 3.0}, 3.0),
        ({"model": "resnet18", "dataset": "synthetic", "compressor": "group_topk:preset=patent"}, 42.63),
        ({"model": "resnet18", "dataset": "synthetic", "compressor": "group_topk:scope=model", "bucket_mb": 50.0}, 50),
        ({"model": "resnet18", "dataset": "synthetic", "compressor": "group_topk:preset=patent,scope=bucket"}, 18.33),
    ],
    ids=str,
)
def test_buckets_follow_the_size_of_the_model(choice: dict[str, Any], bucket_mb: float | None) -> None:
    chosen = resolve(RunConfig(**choice)).bucket_mb
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
        match=r"and --bucket-mb 0\.1 is too small for it; leave out --bucket-mb, or give --bucket-mb 0\.7369 or more",
    ):
        resolve(asked)
    chosen = resolve(dataclasses.replace(asked, bucket_mb=None))
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
    config = resolve(RunConfig(compressor=compressor, lr=0.1, lr_scaling=given, world_size=4))  # type: ignore[arg-type]
    assert config.lr_scaling == scaling
    peak = learning_rate(config, 0, 100, 10)
    assert peak == pytest.approx(0.1 * {"linear": 4, "linear:base=2": 2, "none": 1}[scaling], rel=1e-3)
    notes = [note for note in config.notes if "scales the learning rate" in note]
    assert [says in note for note in notes] == [True] * bool(says)
