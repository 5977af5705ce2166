"""The payload kinds, one file each. Importing this package registers them all with `collectives.payload.unpack`."""

from __future__ import annotations

from collectives.kinds.bundle import Bundle, members
from collectives.kinds.cholesky_factor import CholeskyFactor
from collectives.kinds.codes import Codes
from collectives.kinds.dense import Dense
from collectives.kinds.group_sparse import GroupSparse
from collectives.kinds.row_sparse import RowSparse
from collectives.kinds.seeded import Seeded
from collectives.kinds.sparse import Sparse
from collectives.kinds.terms import Terms
from collectives.kinds.triangle import Triangle
from collectives.kinds.two_means import TwoMeans

__all__ = [
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
]
