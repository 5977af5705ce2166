"""Tables of refusals: each applies to some choice and names it in a sentence, and what it advises is possible."""

from __future__ import annotations

from typing import Any

import pytest

from bench.core import registry
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch import refusals
from bench.launch.plan import plan, with_ranks
from tests.testing.refusals import check_choice, check_complete, shown

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
    *(
        {"strategy": f"local:steps=auto,{option}"}
        for option in ("fragments=2", "delay=2", "start_after=2", "average=senders", "clip=median")
    ),
    {"strategy": "local:seconds=3"},
    {"strategy": "local:steps=10,fragments=3"},
    {"strategy": "local:preset=streaming,delay=25"},
    {"strategy": "local:nesterov=true"},
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
]
# Runs that cannot resume with three ranks.
FIXED: list[dict[str, Any]] = [
    {"nnodes": 2, "rdzv_endpoint": "host0:29500"},
    {"partition": "dirichlet:alpha=1"},
    {"strategy": "local:steps=auto"},
    {"compressor": "torch_powersgd"},
    {"optimizer": "max_adabelief"},
    {"collective": "server:placement=sharded"},
]
# What a component refuses by itself, with a part of its sentence.
OF_COMPONENTS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "local:quorum=2"}, "local has no option 'quorum'"),
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


@pytest.mark.parametrize("choice", CHOICES, ids=map(shown, CHOICES))
def test_a_refusal_names_the_choice_and_its_advice_is_legal(choice: dict[str, Any]) -> None:
    check_choice(choice)


@pytest.mark.parametrize("choice", FIXED, ids=map(shown, FIXED))
def test_what_ties_a_run_to_its_ranks_is_said(choice: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"so the run cannot change its number of ranks; leave out --world-size"):
        with_ranks(plan(RunConfig(**choice)), 3)


# No collective of this project refuses whole gradients.
NEVER = {("DionOptions.refusals", 1), ("OneBitOptions.refusals", 1), ("MaxAdaBeliefOptions.refusals", 0)}


def test_every_refusal_of_every_table_applies_to_some_choice() -> None:
    tables = {name for name in vars(refusals) if name.endswith("_refusals")}
    tables -= {"resizing_refusals", "straggler_refusals"}  # tested above; part of another table
    for kind, function in (("strategies", "refusals"), ("optimizers", "refusals"), ("collectives", "rank_refusals")):
        components = [registry.load(kind, name) for name in registry.entries(kind)]
        ours = [each for each in components if not each.__module__.startswith("bench.extensions.")]
        tables |= {getattr(component, function).__qualname__ for component in ours}
    tables -= {"Optimizer.refusals", "Strategy.refusals", "Collective.rank_refusals"}  # empty
    check_complete(CHOICES, dict.fromkeys(tables, 0), NEVER)


@pytest.mark.parametrize(("choice", "sentence"), OF_COMPONENTS, ids=[shown(choice) for choice, _ in OF_COMPONENTS])
def test_what_a_component_refuses_by_itself(choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan(RunConfig(**choice))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
