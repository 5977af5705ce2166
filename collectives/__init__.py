"""Payloads and the ways ranks sum them: a library that knows torch and nothing of benchmarks.

`from collectives import Dense, unpack` or `from collectives.ring import Ring`; nothing heavy is imported before a name
is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.base import Collective
    from collectives.kinds import (
        Bundle,
        CholeskyFactor,
        Codes,
        Dense,
        GroupSparse,
        RowSparse,
        Seeded,
        Sparse,
        Terms,
        Triangle,
        TwoMeans,
        members,
    )
    from collectives.payload import Payload, PayloadError, unpack
    from collectives.transport import Transport, TransportError

_KINDS = (
    "Bundle",
    "CholeskyFactor",
    "Codes",
    "Dense",
    "GroupSparse",
    "RowSparse",
    "Seeded",
    "Sparse",
    "Terms",
    "Triangle",
    "TwoMeans",
    "members",
)
_HOMES = {
    "Collective": "collectives.base",
    "Payload": "collectives.payload",
    "PayloadError": "collectives.payload",
    "unpack": "collectives.payload",
    "Transport": "collectives.transport",
    "TransportError": "collectives.transport",
    **dict.fromkeys(_KINDS, "collectives.kinds"),
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
    "Terms",
    "Transport",
    "TransportError",
    "Triangle",
    "TwoMeans",
    "members",
    "unpack",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'collectives' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
