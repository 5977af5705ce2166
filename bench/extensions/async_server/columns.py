"""Columns of metrics.csv about the staleness of the parameters from which gradients are computed."""

from bench.core.columns import Column

COLUMNS = (
    Column(
        "health",
        "staleness_mean",
        float,
        "updates that the server made between sending parameters and applying the gradient computed from them, mean "
        "over ranks and steps (empty: the strategy waits for all ranks)",
        deterministic=False,
    ),
    Column(
        "health",
        "staleness_max",
        float,
        "updates that the server made between sending parameters and applying the gradient computed from them, maximum",
        deterministic=False,
    ),
)
