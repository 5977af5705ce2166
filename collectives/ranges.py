"""Ranges that options share: every number has two ends, so that what no machine can do is refused where it is asked."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le

MOST = 10**9
Count = Annotated[int, Ge(1), Le(MOST)]
CountOrZero = Annotated[int, Ge(0), Le(MOST)]
Positive = Annotated[float, Gt(0), Le(1e12)]
PositiveOrZero = Annotated[float, Ge(0), Le(1e12)]
