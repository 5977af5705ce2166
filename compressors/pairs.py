"""Which compressor may ride on which collective, derived from what both declare."""

from __future__ import annotations

from collectives.base import Collective
from compressors.base import Compressor


def refusal(compressor: Compressor, collective: type[Collective] | Collective) -> str | None:
    """Why this pair is impossible and what would work, one sentence; None where it is possible.

    A pair is possible if the collective takes every kind of payload that the compressor emits under its options.

    Args:
        compressor: with its options.
        collective: the class, or an instance where its options matter too.
    """
    refuses = collective.refuses if isinstance(collective, type) else collective.refusal
    if compressor.engine_hook:
        if collective.component_name == "native":
            return None
        return (
            f"{compressor.component_name} is PyTorch's own communication hook and talks to the backend itself; "
            "use collective native"
        )
    for kind in sorted(compressor.emits, key=lambda kind: kind.__name__):
        if reason := refuses(kind):
            return f"{compressor.component_name} sends {kind.__name__} payloads: {reason}"
    return None
