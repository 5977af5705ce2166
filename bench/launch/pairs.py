"""Find the pairs of collective and compressor that `bench collectives` can measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from bench.core import registry, spec
from bench.core.config.collectives import Dtype
from bench.core.errors import UsageError
from bench.launch.old_spellings import refuse_old_spelling
from collectives.base import Collective
from compressors.base import Compressor

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
        (name, sender_name): cast(Compressor, sender).refusal(cast(Collective, collective))
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
    if compressor.engine_hook or type(compressor).reduce is not Compressor.reduce:
        raise UsageError(f"{name} needs several rounds for one sum; measure it with `bench run`")
    if compressor.chooses:
        raise UsageError(f"{name} encodes nothing itself; name the compressors that it tries, such as topk or bf16")
    if dtype.startswith("int") and compressor.component_name != "none":
        raise UsageError(f"{name} compresses floating-point tensors; sum --dtype {dtype} with --compressors none")


def check_collective(text: str, world_size: int) -> None:
    """Check that a collective can be measured outside of training.

    Raises:
        UsageError: it or one of its options is unknown, or it needs a training run or another number of ranks.
    """
    refuse_old_spelling(text)
    collective = cast(Collective, spec.build("collectives", text))
    if collective.recodes or collective.keeps_residuals:
        raise UsageError(
            f"{text} needs the compressor of a training run; use downlink=dense or union without error feedback"
        )
    if reason := collective.ranks_refusal(world_size):
        raise UsageError(reason)
