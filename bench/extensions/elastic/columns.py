"""Columns of metrics.csv about ranks that were lost."""

from bench.core.columns import Column

COLUMNS = (
    Column(
        "health",
        "ranks_lost",
        int,
        "times so far that a rank was lost, or left out because it was late (empty: all ranks take part in everything)",
        better="lower",
        deterministic=False,
    ),
    Column(
        "health",
        "ranks_returned",
        int,
        "times so far that a lost rank joined again (empty: all ranks take part in everything)",
        deterministic=False,
    ),
)
