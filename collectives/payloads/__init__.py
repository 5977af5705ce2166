"""The payload kinds, one file each. Importing anything from here registers them all, so that `unpack` knows them."""

from __future__ import annotations

from collectives.payloads.base import Payload, PayloadError, unpack
from collectives.payloads.bundle import Bundle, members
from collectives.payloads.cholesky_factor import CholeskyFactor
from collectives.payloads.codes import Codes
from collectives.payloads.dense import Dense
from collectives.payloads.group_sparse import GroupSparse
from collectives.payloads.row_sparse import RowSparse
from collectives.payloads.seeded import Seeded
from collectives.payloads.sparse import Sparse
from collectives.payloads.sparse_levels import SparseLevels
from collectives.payloads.triangle import Triangle
from collectives.payloads.two_means import TwoMeans
from collectives.payloads.unreduced_sum import UnreducedSum

__all__ = [
    "Bundle",
    "CholeskyFactor",
    "Codes",
    "Dense",
    "GroupSparse",
    "Payload",
    "PayloadError",
    "RowSparse",
    "Seeded",
    "Sparse",
    "SparseLevels",
    "Triangle",
    "TwoMeans",
    "UnreducedSum",
    "members",
    "unpack",
]
