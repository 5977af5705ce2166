"""The payload kinds, one file each. Importing this package registers them all with `collectives.payload.unpack`."""

from __future__ import annotations

from collectives.kinds.bundle import Bundle, members
from collectives.kinds.dense import Dense
from collectives.kinds.group_sparse import GroupSparse
from collectives.kinds.sparse import Sparse
from collectives.kinds.terms import Terms

__all__ = ["Bundle", "Dense", "GroupSparse", "Sparse", "Terms", "members"]
