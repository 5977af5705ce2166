"""Broken plug-ins: a command that does not name one works; a command that names one ends with one sentence."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from tests.attack.tally import Tally
from tests.testing import broken_plugins
from tests.testing.invoke import execute

OTHERS = (
    ("list",),
    ("list", "--long"),
    ("list", "pairs", "--json"),
    ("data", "list"),
    ("doctor", "--no-smoke"),
    ("run", "--model", "linear", "--steps", "2", "--dry-run"),
    ("run", "--model", "linear", "--steps", "2"),
    ("collectives", "--sizes", "1kB", "--iters", "1", "--rounds", "1", "--collectives", "native,ring"),
    ("compressors", "--model", "linear", "--repeats", "1", "--compressors", "none,topk"),
)
NAMING = (
    ("run", "--model", "linear", "--steps", "2", "--dry-run", "--compressor"),
    ("run", "--model", "linear", "--steps", "2", "--compressor"),
    ("compressors", "--model", "linear", "--repeats", "1", "--compressors"),
    ("collectives", "--sizes", "1kB", "--iters", "1", "--rounds", "1", "--compressors"),
)


def attack(rng: random.Random, tally: Tally, tries: int) -> None:
    """Run commands with a package of broken components installed.

    Args:
        rng: source of all choices.
        tally: gets one count per command.
        tries: number of commands.
    """
    with tempfile.TemporaryDirectory(prefix="bench-attack-") as name:
        folder = Path(name)
        broken_plugins.install(folder)
        for _ in range(tries):
            if not tally.has_time():
                return
            is_named = rng.random() < 0.5
            named = rng.choice(sorted(broken_plugins.REASONS))
            command = [*rng.choice(NAMING), named] if is_named else rng.choice(OTHERS)
            answer = execute(*command, cwd=folder, PYTHONPATH=name)
            expected = 2 if is_named else 0
            is_right = answer.code == expected and "Traceback" not in answer.error
            failure = None if is_right else f"{' '.join(command)} ended with {answer.code}: {answer.error[-800:]}"
            tally.count("named" if is_named else "not named", failure)
