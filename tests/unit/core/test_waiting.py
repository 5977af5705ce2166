"""Lines about what a command is doing, if it takes long."""

from __future__ import annotations

import subprocess
import sys

BEGIN = "import select; from bench.core.waiting import waiting; waiting.begin('predict'); waiting.doing('topk'); "


def said_after(statements: str) -> str:
    done = subprocess.run([sys.executable, "-c", BEGIN + statements], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


def test_after_half_a_second_a_line_says_what_is_done() -> None:
    assert said_after("select.select([], [], [], 0.8)").startswith("bench predict: topk (0.")


def test_a_command_that_has_ended_or_shows_its_own_progress_says_nothing() -> None:
    assert said_after("waiting.end(); select.select([], [], [], 0.8)") == ""
    live = "from bench.api.progress import LiveLine; waiting.begin('run'); LiveLine('job', quiet=True).__enter__(); "
    assert "bench run" not in said_after(live + "select.select([], [], [], 0.8)")
