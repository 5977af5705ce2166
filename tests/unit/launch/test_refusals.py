"""Tables of refusals: each applies to some choice and names it in a sentence, and what it advises is possible."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from bench.core import registry, spec
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch import refusals
from bench.launch.plan import plan, with_ranks
from collectives.options import Spec, value_text
from collectives.refusals import Refused
from tests.testing.devices import CXL

ASP, SSP = "async_server:mode=asp", "async_server"
PLACED, BY_DATA = f"placed:devices={CXL}", f"placed:by=data,devices={CXL}"

# What tables refuse.
CHOICES: list[dict[str, Any]] = [
    {"epochs": 1, "steps": 1},
    {"max_restarts": 1},
    {"track": "mlflow"},
    {"nnodes": 2},
    {"node_rank": 1},
    {"world_size": 3, "nnodes": 2, "rdzv_endpoint": "host0:29500"},
    {"hosts": 2, "world_size": 3},
    {"hosts": 2, "device": "cuda"},
    {"hosts": 2, "nnodes": 2, "rdzv_endpoint": "host0:29500"},
    {"straggler": "rank=2,slowdown=3"},
    {"holdout_size": 2000},
    {"train_size": 1},
    {"test_size": 1},
    {"batch_size": 5000},
    {"batch_size": 1, "accumulate": 5000},
    {"dataset": "stdlib", "model": "gpt", "partition": "dirichlet:alpha=1"},
    {"target_bits_per_byte": 2.0},
    {"dataset": "stdlib", "model": "gpt", "target_bits_per_byte": 2.0, "target_accuracy": 0.5},
    {"stop_at_target": True},
    {"partition": "classes:per_rank=11"},
    {"partition": "classes:per_rank=2"},
    {"lr_scaling": "linear:gradual=true"},
    {"steps": 4, "eval_every": 0.5},
    {"clip_norm": 1.0, "compressor": "dgc"},
    {"clip_norm": 1.0, "compressor": "topk:momentum_correction=true"},
    {"clip_norm": 1.0, "optimizer": "max_adabelief"},
    {"clip_norm": 1.0, "optimizer": "kfac:inner=max_adabelief"},
    {"clip_norm": 1.0, "optimizer": "dion"},
    {"compressor": "group_topk:scope=model,group_size=512", "bucket_mb": 0.1},
    {"compressor": "torch_fp16", "trigger": "sync"},
    {"compressor": "torch_fp16", "optimizer": "max_adabelief"},
    {"compressor": "auto", "optimizer": "kfac"},
    {"accumulate": 2, "optimizer": "kfac"},
    {"bucket_mb": 1.0, "optimizer": "max_adabelief"},
    {"collective": "server:root=2"},
    {"collective": "direct:shares=bandwidth,rates=1+2+3"},
    {"collective": "hierarchical:inter=server:root=1"},
    {"compressor": "topk", "optimizer": "dion"},
    {"compressor": "bf16:min_numel=100,skip=conv", "optimizer": "dion"},
    {"compressor": "bf16:error_feedback=true", "optimizer": "dion"},
    {"compressor": "bf16", "collective": "server:error_feedback=true", "optimizer": "dion"},
    {"compressor": "topk", "optimizer": "demo"},
    {"collective": "ring", "optimizer": "demo"},
    {"compressor": "topk", "optimizer": "onebit_adam"},
    {"compressor": "topk", "optimizer": "zero_one_adam"},
    {"collective": "allgather", "optimizer": "max_adabelief:reduce=s_max"},
    {"collective": "hierarchical:inter=allgather", "optimizer": "max_adabelief:reduce=s_max"},
    {"optimizer": "kfac:collective=ring:requantise=true"},
    {"optimizer": "kfac:transfer=cholesky", "collective": "server:downlink=recode"},
    {"strategy": ASP, "collective": "ring"},
    {"strategy": ASP, "collective": "server:downlink=union"},
    {"strategy": "async_server:root=2"},
    {"strategy": ASP, "device": "cuda"},
    {"strategy": ASP, "trigger": "sync"},
    {"strategy": ASP, "bucket_mb": 1.0},
    {"strategy": ASP, "accumulate": 2},
    {"strategy": ASP, "compressor": "torch_powersgd"},
    {"strategy": ASP, "compressor": "powersgd"},
    {"strategy": SSP, "compressor": "terngrad:shared_scale=true"},
    {"strategy": ASP, "compressor": "hylo:shared_threshold=true"},
    {"strategy": ASP, "compressor": "group_topk:preset=patent"},
    {"strategy": ASP, "optimizer": "max_adabelief"},
    {"strategy": ASP, "optimizer": "muon:shard=true"},
    {"strategy": ASP, "optimizer": "muon"},
    {"strategy": PLACED, "hosts": 5},
    {"strategy": PLACED, "nnodes": 5, "rdzv_endpoint": "host0:29500"},
    {"strategy": PLACED, "device": "cuda"},
    {"strategy": PLACED, "bucket_mb": 1.0},
    {"strategy": PLACED, "accumulate": 2},
    {"strategy": PLACED, "clip_norm": 1.0},
    {"strategy": PLACED, "amp": "bf16"},
    {"strategy": PLACED, "profile": 1},
    {"strategy": PLACED, "straggler": "rank=0,slowdown=2"},
    {"strategy": PLACED, "collective": "ring"},
    {"strategy": BY_DATA, "collective": "native"},
    {"strategy": f"{BY_DATA},merge=host", "collective": "ring"},
    {"strategy": f"{PLACED},merge=host"},
    {"strategy": f"{BY_DATA},activations=dpu"},
    {"strategy": BY_DATA, "compressor": "torch_fp16"},
    {"strategy": PLACED, "compressor": "topk"},
    {"strategy": PLACED, "optimizer": "muon"},
    {"strategy": BY_DATA, "optimizer": "kfac:inner=max_adabelief"},
    {"strategy": BY_DATA, "optimizer": "zero_one_adam"},
    *(
        {"strategy": f"local:steps=auto,{option}"}
        for option in ("fragments=2", "delay=2", "start_after=2", "average=senders", "clip=median")
    ),
    {"strategy": "local:seconds=3"},
    {"strategy": "local:steps=10,fragments=3"},
    {"strategy": "local:preset=streaming,delay=25"},
    {"strategy": "local:nesterov=true"},
    {"strategy": "local:quorum=1,steps=auto"},
    {"strategy": "local:quorum=1,preset=streaming"},
    {"strategy": "local:quorum=1,preset=post_local"},
    {"strategy": "local:deadline=3"},
    {"strategy": "local", "compressor": "torch_fp16"},
    {"strategy": "local", "compressor": "auto"},
    {"strategy": "local:preset=diloco", "compressor": "dgc"},
    {"strategy": "local", "compressor": "dgc"},
    {"strategy": "local:preset=streaming", "compressor": "group_topk:scope=model"},
    {"strategy": "local:preset=streaming", "compressor": "hylo:importance=taylor"},
    {"strategy": "local:average=senders", "compressor": "topk", "collective": "ring"},
    {"strategy": "local:clip=median"},
    {"strategy": "local:clip=median", "compressor": "powersgd", "collective": "allgather"},
    {"strategy": "local:preset=sparseloco"},
    {
        "strategy": "local:decay=0.5",
        "compressor": "qsgd:error_feedback=true,bits=8",
        "collective": "ring:requantise=true",
    },
    {"strategy": "local:decay=0.5", "compressor": "topk", "collective": "server:downlink=recode"},
    {"strategy": "local", "optimizer": "kfac"},
    {"strategy": "local", "optimizer": "max_adabelief"},
    {"strategy": "local", "optimizer": "zero_one_adam"},
    {"strategy": "local", "trigger": "sync"},
    {"strategy": "local", "bucket_mb": 1.0},
    {"strategy": "local:quorum=1", "checkpoint_every": 1},
    {"strategy": "local:quorum=1", "device": "cuda"},
    {"strategy": "local:quorum=1", "collective": "native"},
    {"strategy": "local:quorum=1", "collective": "hierarchical:inter=native"},
    {"strategy": "local:quorum=1", "collective": "pool"},
    {"strategy": "local:quorum=1", "collective": "direct:shares=bandwidth"},
    {"strategy": "local:quorum=1", "compressor": "topk", "collective": "server:downlink=recode"},
    {"strategy": "local:quorum=3"},
    {"strategy": "local:quorum=1", "collective": "server:root=1"},
]
# Runs that cannot resume with three ranks.
FIXED: list[dict[str, Any]] = [
    {"nnodes": 2, "rdzv_endpoint": "host0:29500"},
    {"partition": "dirichlet:alpha=1"},
    {"strategy": ASP},
    {"strategy": "local:steps=auto"},
    {"compressor": "torch_powersgd"},
    {"optimizer": "max_adabelief"},
    {"collective": "server:placement=sharded"},
]
# What a component refuses by itself, with a part of its sentence.
OF_COMPONENTS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "async"}, "there is no strategy 'async' (did you mean 'async_server'?)"),
    ({"strategy": ASP, "compressor": "dgc", "optimizer": "adam"}, "adam has no momentum to hand over"),
    ({"strategy": "async_server:mode=asp,staleness=2"}, "staleness=2 bounds mode=ssp; leave it out of mode=asp"),
    ({"strategy": "async_server:staleness=-1"}, "staleness=-1 is not possible"),
    ({"strategy": "async_server:mode=bsp"}, "mode=bsp is not possible"),
    ({"strategy": "local:quorum=-1"}, "local: quorum=-1 is not possible: give 0 or more"),
    ({"strategy": "local:steps=often"}, "local: steps=often is not possible: give a whole number, or auto"),
    ({"strategy": "local:steps=90,fragments=45"}, "fragments=45 needs a model of as many blocks, and this one has"),
    ({"collective": "server:mode=asp"}, "server has no option 'mode'"),
    ({"model": "linear", "dataset": "synthetic:size=64"}, "use --model resnet50:stem=imagenet, or leave size out of"),
    ({"compressor": "dgc", "optimizer": "max_adabelief"}, "max_adabelief has no momentum to hand over"),
    ({"compressor": "dgc", "optimizer": "muon"}, "muon has no momentum to hand over to momentum_correction"),
    ({"model": "linear", "optimizer": "muon"}, "muon updates hidden matrices, and this model has none besides its"),
    ({"model": "linear", "optimizer": "kfac:inner=muon"}, "muon updates hidden matrices, and this model has none"),
    ({"collective": "ring:requantise=true", "optimizer": "onebit_adam"}, "and compressor none sends no codes"),
]


def shown(choice: dict[str, Any]) -> str:
    return " ".join(str(value).removeprefix(str(CXL)) for value in choice.values())


def refused(choice: dict[str, Any]) -> tuple[str, Refused]:
    """Return the sentence that the user reads, and the refusal."""
    with pytest.raises(UsageError) as raised:
        plan(RunConfig(**choice))
    cause = raised.value.__context__
    assert isinstance(cause, Refused), cause
    return str(raised.value), cause


def taking(choice: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return the choice with what a refusal advises."""
    changed = dict(choice)
    for name, value in change.items():
        field, _, option = name.partition(".")
        if option:
            asked = Spec.parse(changed[field])
            options = {each: text for each, text in asked.options.items() if each != option}
            changed[field] = str(Spec(asked.name, options | ({} if value is None else {option: value_text(value)})))
        else:
            changed[field] = value
    return {name: value for name, value in changed.items() if value is not None}


def names_of(choice: dict[str, Any]) -> set[str]:
    """Return how a sentence can name what was chosen: options, components, and options of components."""
    names = {f"--{name.replace('_', '-')}" for name in choice}
    for text in (text for name, text in choice.items() if f"{name}s" in registry.KINDS or name == "strategy"):
        asked = spec.parse(text)
        names |= {asked.name, *(f"{option}=" for option in asked.options)}
    return names


@pytest.mark.parametrize("choice", CHOICES, ids=map(shown, CHOICES))
def test_a_refusal_names_the_choice_and_its_advice_is_legal(choice: dict[str, Any]) -> None:
    sentence, cause = refused(choice)
    assert "\n" not in sentence
    assert any(name in cause.refusal.reason for name in names_of(choice)), sentence
    assert cause.refusal.advice
    for change in cause.refusal.advice:
        plan(RunConfig(**taking(choice, dict(change))))


@pytest.mark.parametrize("choice", FIXED, ids=map(shown, FIXED))
def test_what_ties_a_run_to_its_ranks_is_said(choice: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"so the run cannot change its number of ranks; leave out --world-size"):
        with_ranks(plan(RunConfig(**choice)), 3)


# No collective of this project refuses whole gradients.
NEVER = {("DionOptions.refusals", 1), ("OneBitOptions.refusals", 1), ("MaxAdaBeliefOptions.refusals", 0)}


def test_every_refusal_of_every_table_applies_to_some_choice() -> None:
    fired: dict[str, set[int]] = collections.defaultdict(set)
    sizes: dict[str, int] = {}
    for choice in CHOICES:
        _, cause = refused(choice)
        fired[cause.table].add(cause.number)
        sizes[cause.table] = min(cause.size, sizes.get(cause.table, cause.size))  # kfac's includes that of its inner
    tables = {name for name in vars(refusals) if name.endswith("_refusals")}
    tables -= {"resizing_refusals", "straggler_refusals"}  # tested above; part of another table
    for kind in ("strategies", "optimizers"):
        components = [registry.load(kind, name) for name in registry.entries(kind)]
        tables |= {component.refusals.__qualname__ for component in components}  # type: ignore[attr-defined]
    tables |= {
        registry.load("collectives", name).rank_refusals.__qualname__ for name in registry.entries("collectives")
    }
    tables -= {"Optimizer.refusals", "Strategy.refusals", "Collective.rank_refusals"}  # empty
    assert tables <= set(sizes)
    expected = {(name, number) for name, size in sizes.items() for number in range(size)} - NEVER
    assert {(name, number) for name, numbers in fired.items() for number in numbers} >= expected


@pytest.mark.parametrize(("choice", "sentence"), OF_COMPONENTS, ids=[shown(choice) for choice, _ in OF_COMPONENTS])
def test_what_a_component_refuses_by_itself(choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan(RunConfig(**choice))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
