"""Plan how a compressor treats each layer of a model, for `bench run --dry-run`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch

from bench.core import registry, spec
from bench.core.config.measurements import Dtype
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.datasets.base import Dataset
from bench.models.base import Model
from collectives.base import Collective
from collectives.options import incompatibility
from compressors.base import FP32_BYTES, Compressor, OwnHook, PerLayer
from compressors.layer import Kind, Layer, layers_of

BASELINE = "native"

# (collective, compressor) as spec texts, with only the options that differ from their default.
Pair = tuple[str, str]


def legal_pairs(
    compressors: Sequence[str], collectives: Sequence[str] | None, dtype: Dtype
) -> tuple[list[Pair], list[str]]:
    """Return the pairs that work together, sorted by compressor, and the reasons why other named pairs do not.

    Args:
        compressors: spec texts.
        collectives: spec texts; None: all collectives.
        dtype: dtype of the tensor that is summed.

    Raises:
        UsageError: a component or option does not exist, or a named component works with none of the others.
    """
    senders = _built("compressors", compressors)
    sums = _built("collectives", collectives if collectives is not None else _all_collectives())
    for name, sender in senders.items():
        _check_sender(name, cast(Compressor, sender), dtype)
    reasons = {
        (name, sender_name): incompatibility(sender.check_compatible, collective)
        for sender_name, sender in senders.items()
        for name, collective in sums.items()
    }
    pairs = [pair for pair, reason in reasons.items() if reason is None]
    named = [(1, name) for name in senders] + [(0, name) for name in sums if collectives is not None]
    for part, name in named:
        if not any(pair[part] == name for pair in pairs):
            raise UsageError(next(reason for pair, reason in reasons.items() if pair[part] == name and reason))
    left_out = [reason for reason in reasons.values() if reason] if collectives is not None else []
    return pairs, left_out


def _built(kind: str, texts: Sequence[str]) -> dict[str, Any]:
    """Build components; return them by short spec text."""
    components = [spec.build(kind, text) for text in texts]
    return {spec.short_text(component): component for component in components}


def _all_collectives() -> list[str]:
    """Return the names of all collectives, the baseline first."""
    usable = registry.ask_each("collectives", lambda component: component())
    return sorted(usable, key=lambda name: (name != BASELINE, name))


def _check_sender(name: str, compressor: Compressor, dtype: Dtype) -> None:
    if isinstance(compressor, OwnHook):
        raise UsageError(f"{name} encodes nothing itself; name the compressors that it tries, such as topk or bf16")
    if not isinstance(compressor, PerLayer):
        raise UsageError(f"{name} needs several rounds for one sum; measure it with `bench run`")
    if dtype.startswith("int") and compressor.component_name != "none":
        raise UsageError(f"{name} compresses floating-point tensors; sum --dtype {dtype} with --compressors none")


def check_collective(text: str, world_size: int) -> None:
    """Check that a collective can be measured outside of training.

    Raises:
        UsageError: it or one of its options is unknown, or it needs a training run or another number of ranks.
    """
    collective = cast(Collective, spec.build("collectives", text))
    if collective.recodes or collective.keeps_residuals:
        raise UsageError(
            f"{text} needs the compressor of a training run; use downlink=dense or union without error feedback"
        )
    with spec.usage_errors():
        collective.check_ranks(world_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """One layer in the plan.

    Attributes:
        name: the parameter's name.
        shape: the parameter's shape.
        kind: kind of layer.
        payload: class of the payload; "Dense" (fp32) if the compressor leaves the layer uncompressed, "to be chosen"
            if that is decided during training.
        dense_nbytes: bytes of the gradient in fp32.
        sent_nbytes: bytes of the payload at full compression if the layer is sent on its own; None if that depends on
            the data.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    payload: str
    dense_nbytes: int
    sent_nbytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The plan of all layers.

    Attributes:
        layers: one row per parameter.
        dense_nbytes: bytes of the whole gradient in fp32.
        sent_nbytes: bytes of one rank's packed payload at full compression, with the whole model in one bucket; None
            if that depends on the data.
        warnings: notes for the user about the compressor, one sentence each.
    """

    layers: list[PlannedLayer]
    dense_nbytes: int
    sent_nbytes: int | None
    warnings: list[str]


def plan_layers(config: RunConfig) -> LayerPlan:
    """Return the plan of a complete configuration, computed from shapes alone."""
    dataset = cast(Dataset, spec.build("datasets", config.filled["dataset"]))
    compressor = cast(Compressor, spec.build("compressors", config.filled["compressor"]))
    with torch.device("meta"):
        model = cast(Model, spec.build("models", config.filled["model"])).build(dataset.num_classes)
    layers = layers_of(model)
    rows = planned_layers(compressor, layers)
    return LayerPlan(
        layers=rows,
        dense_nbytes=sum(row.dense_nbytes for row in rows),
        sent_nbytes=compressor.expected_bucket_nbytes(layers),
        warnings=compressor.warnings(),
    )


def planned_layers(compressor: Compressor, layers: Sequence[Layer]) -> list[PlannedLayer]:
    """Return one row per layer, in the given order."""
    return [
        PlannedLayer(
            name=layer.name,
            shape=layer.shape,
            kind=layer.kind,
            payload=_payload(compressor, layer),
            dense_nbytes=FP32_BYTES * layer.numel,
            sent_nbytes=compressor.expected_bucket_nbytes([layer]),
        )
        for layer in layers
    ]


def _payload(compressor: Compressor, layer: Layer) -> str:
    if isinstance(compressor, OwnHook):
        return "to be chosen"
    if compressor.leaves_dense(layer) or not isinstance(compressor, PerLayer):
        return "Dense"
    return compressor.kind_for(layer).__name__
