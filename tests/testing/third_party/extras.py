"""A metric and a command."""

from __future__ import annotations

from bench.report.quality import Metric

DISTANCE = Metric(column="test_distance", noun="distance")


def wave() -> None:
    """Wave to the user."""
    print("hello")
