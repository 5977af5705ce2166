"""All kinds of payloads; importing this package registers the kinds, so that `unpack` can decode each kind."""

from collectives.payloads.base import Dense, Payload, PayloadError, unpack
from collectives.payloads.bundle import Bundle, UnreducedSum, members
from collectives.payloads.codes import Codes, TwoMeans
from collectives.payloads.group_sparse import GroupSparse, RowSparse, SparseCodes
from collectives.payloads.packed_bundle import CodedBundle, SparseBundle
from collectives.payloads.sparse import Seeded, Sparse, SparseLevels
from collectives.payloads.symmetric import CholeskyFactor, Triangle

__all__ = [
    "Bundle",
    "CholeskyFactor",
    "CodedBundle",
    "Codes",
    "Dense",
    "GroupSparse",
    "Payload",
    "PayloadError",
    "RowSparse",
    "Seeded",
    "Sparse",
    "SparseBundle",
    "SparseCodes",
    "SparseLevels",
    "Triangle",
    "TwoMeans",
    "UnreducedSum",
    "members",
    "unpack",
]
