"""Payloads and the ways ranks sum them: a library that knows torch and nothing of benchmarks.

`from collectives import Dense, unpack` or `from collectives.ring import Ring`; nothing heavy is imported before a name
is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.base import Collective
    from collectives.payloads import (
        Bundle,
        CholeskyFactor,
        Codes,
        Dense,
        GroupSparse,
        RowSparse,
        Seeded,
        Sparse,
        Triangle,
        TwoMeans,
        UnreducedSum,
        members,
    )
    from collectives.payloads.base import Payload, PayloadError, unpack
    from collectives.transport.base import Transport, TransportError

_KINDS = (
    "Bundle",
    "CholeskyFactor",
    "Codes",
    "Dense",
    "GroupSparse",
    "RowSparse",
    "Seeded",
    "Sparse",
    "UnreducedSum",
    "Triangle",
    "TwoMeans",
    "members",
)
_HOMES = {
    "Collective": "collectives.base",
    "Payload": "collectives.payloads.base",
    "PayloadError": "collectives.payloads.base",
    "unpack": "collectives.payloads.base",
    "Transport": "collectives.transport.base",
    "TransportError": "collectives.transport.base",
    **dict.fromkeys(_KINDS, "collectives.payloads"),
}

__all__ = [
    "Bundle",
    "CholeskyFactor",
    "Codes",
    "Collective",
    "Dense",
    "GroupSparse",
    "Payload",
    "PayloadError",
    "RowSparse",
    "Seeded",
    "Sparse",
    "Transport",
    "TransportError",
    "Triangle",
    "TwoMeans",
    "UnreducedSum",
    "members",
    "unpack",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'collectives' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
