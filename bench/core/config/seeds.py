"""Parse and write lists of seeds, such as ``1,2,3`` or ``1-5``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bench.core.errors import UsageError

MOST_SEEDS = 1000


def parse_seeds(text: str, option: str = "--seeds") -> list[int]:
    """Return the seeds that a text names.

    Args:
        text: seeds and ranges of seeds, separated by commas.
        option: the option that the text was given for, for messages.

    Raises:
        UsageError: the text has another form, or names no seed, a seed twice, or more than `MOST_SEEDS`.
    """
    seeds: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", item)
        if not match:
            raise UsageError(f"{option} {text} is not a list of seeds; write 1,2,3 or 1-5")
        named = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not named:
            raise UsageError(f"{option} {text} has a range that ends before it begins; write the smaller seed first")
        if len(seeds) + len(named) > MOST_SEEDS:
            raise UsageError(f"{option} {text} names more than {MOST_SEEDS} runs; give fewer seeds")
        seeds += named
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"{option} {text} names no seed, or one of them twice; each seed is one run")
    return seeds


def seeds_text(seeds: Iterable[object]) -> str:
    """Return the seeds separated by commas."""
    return ",".join(str(seed) for seed in seeds)
