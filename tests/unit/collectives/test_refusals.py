"""Refusals: one sentence with the changes that would help, and the first that applies is raised."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.options import incompatibility
from collectives.refusals import Refusal, Refused, refuse


@pytest.mark.parametrize(
    ("advice", "said"),
    [
        ([{"steps": None}, {"epochs": None}], "leave out --steps or --epochs"),
        ([dict.fromkeys(["lr", "data_dir"])], "leave out --lr and --data-dir"),
        ([{"strategy": "ddp"}, {"compressor": "none"}], "use strategy ddp or compressor none"),
        ([{"batch_size": 8, "accumulate": None}], "leave out --accumulate and use --batch-size 8"),
        ([{"bucket_mb": None}, {"bucket_mb": 0.5}], "leave out --bucket-mb, or use --bucket-mb 0.5"),
        ([{"compressor.importance": "l2"}, {"strategy.merge": None}], "use importance=l2, or leave out merge"),
        (
            [{"compressor.momentum_correction": False}, {"clip_norm": 0.0}],
            "use momentum_correction=false or --clip-norm 0",
        ),
    ],
)
def test_a_sentence_ends_with_what_would_help(advice: list[dict[str, Any]], said: str) -> None:
    assert Refusal(True, "they exclude each other", advice).sentence == f"they exclude each other; {said}"


def table(*, first: bool, second: bool) -> list[Refusal]:
    return [Refusal(first, "one", [{"lr": 1}]), Refusal(second, "two", [{"lr": 2}])]


def test_the_first_refusal_that_applies_is_raised_with_its_place() -> None:
    refuse(table, first=False, second=False)
    for both, place in (({"first": True, "second": True}, 0), ({"first": False, "second": True}, 1)):
        with pytest.raises(Refused, match=("one; use --lr 1", "two; use --lr 2")[place]) as raised:
            refuse(table, **both)
        assert (raised.value.table, raised.value.number, raised.value.size) == ("table", place, 2)


def test_a_table_can_be_asked_as_a_check() -> None:
    assert incompatibility(refuse, lambda: table(first=True, second=False)) == "one; use --lr 1"
    assert incompatibility(refuse, lambda: table(first=False, second=False)) is None
