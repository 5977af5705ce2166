"""Objects that ranks gather arrive whole, in rank order, at any length, and are not pickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collectives.transport.process_group import gather_bytes, gather_json

VALUES: list[dict[str, Any]] = [
    {"loss": 0.1 + 0.2, "none": None, "list": [1, 2.5]},
    {"text": "x" * 100_000},
    {"é": float("inf"), "deep": {"er": [True]}},
]


@pytest.mark.ranks(3)
def test_every_rank_hears_all(rank: int) -> None:
    assert gather_json(VALUES[rank]) == VALUES
    assert gather_bytes(bytes([0, rank, 255]) * (rank + 1)) == [bytes([0, each, 255]) * (each + 1) for each in range(3)]


class Command:
    """A command that a pickle would run when it is read."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("run by a stranger",)


@pytest.mark.ranks(3)
def test_what_json_does_not_know_is_not_sent(rank: int) -> None:
    with pytest.raises(TypeError, match="Command is not JSON serializable"):
        gather_json(Command())


@pytest.mark.parametrize("library", ["bench", "gradwire", "compressors", "collectives"])
def test_nothing_is_told_in_pickles(library: str) -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / library).rglob("*.py")}
    calls = ("_object(", "_object_list(", "import pickle", "torch.load(")
    assert [(str(path), call) for path, text in sources.items() for call in calls if call in text] == []
