"""Objects that ranks gather arrive whole, in rank order, at any length, and are not pickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collectives.transport.process_group import gather_bytes, gather_json
from tests.testing.ranks import run_ranks

VALUES: list[dict[str, Any]] = [
    {"loss": 0.1 + 0.2, "none": None, "list": [1, 2.5]},
    {"text": "x" * 100_000},
    {"é": float("inf"), "deep": {"er": [True]}},
]


def told(rank: int) -> tuple[list[Any], list[str]]:
    return gather_json(VALUES[rank]), [raw.hex() for raw in gather_bytes(bytes([0, rank, 255]) * (rank + 1))]


def test_every_rank_hears_all(tmp_path: Path) -> None:
    for values, raw in run_ranks(told, 3, tmp_path):
        assert values == VALUES
        assert raw == ["0000ff", "0001ff0001ff", "0002ff0002ff0002ff"]


class Command:
    """A command that a pickle would run when it is read."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("run by a stranger",)


def refused(rank: int) -> str:
    with pytest.raises(TypeError, match="not JSON serializable") as error:
        gather_json(Command())
    return str(error.value)


def test_what_json_does_not_know_is_not_sent(tmp_path: Path) -> None:
    assert all("Command" in message for message in run_ranks(refused, 2, tmp_path))


@pytest.mark.parametrize("folder", ["bench", "gradwire", "compressors", "collectives"])
def test_nothing_is_told_in_pickles(folder: str) -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / folder).rglob("*.py")}
    calls = ("_object(", "_object_list(", "import pickle", "torch.load(")
    assert [(str(path), call) for path, text in sources.items() for call in calls if call in text] == []
