"""Damaged payloads: every mutation of a packed payload decodes to a valid payload or raises PayloadError."""

from __future__ import annotations

import random
import traceback

from tests.attack.tally import Tally
from tests.testing.mutations import mutated, outcome_of

BATCH = 1000


def attack(rng: random.Random, tally: Tally, batches: int) -> None:
    """Mutate payloads of every kind.

    Args:
        rng: source of all choices.
        tally: gets one count per payload.
        batches: number of batches of a thousand payloads.
    """
    for _ in range(batches):
        if not tally.has_time():
            return
        for _ in range(BATCH):
            raw = mutated(rng)
            try:
                tally.count(outcome_of(raw))
            except Exception:  # noqa: BLE001 - whatever it is, it is the failure that is looked for
                tally.count("payload", f"{bytes(raw).hex()} ended in {traceback.format_exc(limit=-2)}")
