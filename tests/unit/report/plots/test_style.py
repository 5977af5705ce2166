"""The common style of all pictures."""

from __future__ import annotations

from bench.report.plots import style


def test_a_long_name_is_broken_between_options() -> None:
    text = "group_topk:error_feedback=false,group_size=256,preset=patent, lr=0.1"
    lines = style.wrapped(text, 34).split("\n")
    assert lines == ["group_topk:error_feedback=false,", "group_size=256, preset=patent,", "lr=0.1"]
