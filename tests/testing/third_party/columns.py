"""A column that the strategy `averaging` fills."""

from __future__ import annotations

from bench.core.columns import Column

COLUMNS = (Column("quality", "test_distance", float, "distance of the weights from zero", better="lower"),)
