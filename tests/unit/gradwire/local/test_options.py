"""Options of local steps: what is impossible is refused in one sentence, and a preset takes other steps."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.options import OptionError
from gradwire.local.options import LocalOptions


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 10, "fragments": 3}, "fragments=3 does not divide steps=10; use steps=9 or fragments=1"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 is not possible"),
        ({"steps": "auto", "seconds": 0}, "seconds=0 is not possible"),
        ({"steps": "some"}, "steps=some is not possible"),
    ],
    ids=str,
)
def test_impossible_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError) as raised:
        LocalOptions(**options)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_preset_takes_auto() -> None:
    assert LocalOptions.from_text({"preset": "diloco", "steps": "auto", "seconds": "5"}).steps == "auto"
    assert LocalOptions.from_text({"steps": "12"}).interval == 12
