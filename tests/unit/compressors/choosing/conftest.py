"""Prices that no other work on the machine changes."""

from __future__ import annotations

import pytest

from compressors.ddp.choosing import prices
from compressors.ddp.choosing.prices import LinkCost


@pytest.fixture(autouse=True)
def prices_that_no_other_work_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "compressors.ddp.choosing.chooser.measure_link", lambda *_: LinkCost(wave_s=1e-5, per_byte_s=1e-9)
    )
    looked = prices.look
    monkeypatch.setattr(
        "compressors.ddp.choosing.candidates.look", lambda *given: looked(*given)._replace(seconds=1e-5)
    )
