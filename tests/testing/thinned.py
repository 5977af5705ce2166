"""Large matrices of cases: CI takes every second case, `make exhaustive` the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def checkered(*axes: Sequence[Any]) -> list[Any]:
    """Return every combination of the axes' values; those on the black squares of a chessboard are long tests.

    So CI takes every value, and every pair of neighbouring values, of each axis.
    """
    found = []
    for places in itertools.product(*(enumerate(axis) for axis in axes)):
        marks = [pytest.mark.long] if sum(place for place, _ in places) % 2 else []
        found.append(pytest.param(*(value for _, value in places), marks=marks))
    return found


def every_second(cases: Iterable[Any]) -> list[Any]:
    """Return the cases; every second one is a long test."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.long] if index % 2 else [])
        for index, case in enumerate(cases)
    ]
