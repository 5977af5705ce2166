"""Tests that run on every rank.

`@pytest.mark.ranks(2)`: two processes, one gloo rank each, call the test with their `rank`, and it asserts there. The
tests of a module share one start of its ranks, until one fails; a second argument of the mark gives those that have it
a start of their own. Arguments besides `rank` must be picklable parameters, and `folder`, an empty folder of the test
that all ranks see.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.testing.ranks import run_ranks

Case = tuple[str, dict[str, Any]]
"""A test's function and its parameters."""


@pytest.fixture
def rank() -> None:
    """Stand in for the number of the rank, which only the test's processes know."""


@pytest.fixture
def folder() -> None:
    """Stand in for the folder, which the test's processes make."""


def start_of(item: pytest.Item) -> tuple[Any, ...]:
    """Return the number of ranks and what else the tests of one start have in common; nothing for other tests."""
    marker = item.get_closest_marker("ranks")
    return () if marker is None else marker.args


OUTCOMES = pytest.StashKey[str]()
"""why a test failed; empty if it passed"""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    of = start_of(pyfuncitem)
    if not of:
        return None
    if OUTCOMES not in pyfuncitem.stash:
        start(pyfuncitem, of)
    if reason := pyfuncitem.stash[OUTCOMES]:
        pytest.fail(reason, pytrace=False)
    return True


def start(first: pytest.Function, of: tuple[Any, ...]) -> None:
    """Play this test and those of its module that follow, until one fails."""
    number = of[0]
    items = [
        item
        for item in first.session.items
        if isinstance(item, pytest.Function)
        and item.module is first.module
        and start_of(item) == of
        and OUTCOMES not in item.stash
        and not any(item.iter_markers("skip"))
    ]
    items.remove(first)
    items.insert(0, first)
    cases: list[Case] = [
        (item.function.__name__, item.callspec.params if hasattr(item, "callspec") else {}) for item in items
    ]
    with tempfile.TemporaryDirectory() as name:
        said, folder = "", Path(name)
        try:
            run_ranks(play, number, folder, args=(first.module.__name__, cases, folder))
        except pytest.fail.Exception as failure:
            said = str(failure)
        for index, item in enumerate(items):
            if all((folder / f"{index}-{rank}").exists() for rank in range(number)):
                item.stash[OUTCOMES] = ""
            else:
                item.stash[OUTCOMES] = said
                break


def play(rank: int, module: str, cases: list[Case], folder: Path) -> None:
    for index, (name, parameters) in enumerate(cases):
        test = getattr(importlib.import_module(module), name)
        if "folder" in inspect.signature(test).parameters:
            own = folder / f"of {index}"
            own.mkdir(exist_ok=True)
            parameters = parameters | {"folder": own}
        test(rank=rank, **parameters)
        dist.barrier()
        (folder / f"{index}-{rank}").touch()
