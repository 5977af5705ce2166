"""Options of local steps: what is impossible is refused in one sentence, and a preset takes other steps."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.options import OptionError
from gradwire.local.options import LocalOptions


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": "auto", "fragments": 2}, "and fragments=2 needs equal ones; use fragments=1 or a number of steps"),
        ({"steps": "auto", "delay": 1}, "and delay=1 needs equal ones; use delay=0 or"),
        ({"steps": "auto", "preset": "post_local"}, "and start_after=100 needs equal ones; use start_after=0 or"),
        ({"steps": "auto", "average": "senders"}, "and average=senders needs equal ones; use average=ranks or"),
        ({"steps": "auto", "clip": "median"}, "and clip=median needs equal ones; use clip=none or"),
        ({"steps": 10, "fragments": 3}, "fragments=3 does not divide steps=10; choose steps that are a multiple"),
        ({"steps": 6, "fragments": 2, "delay": 3}, "local: delay=3 is not below the 3 steps between two exchanges"),
        ({"nesterov": True}, "local: nesterov=true needs a momentum; add outer_momentum=0.9"),
        ({"preset": "streaming", "steps": 20}, "local: delay=5 is not below the 5 steps between"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 is not possible"),
        ({"seconds": 3.0}, "local: seconds=3 is for steps=auto; add that, or leave out seconds"),
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
