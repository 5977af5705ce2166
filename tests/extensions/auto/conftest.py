"""Fixed prices of links and loops, independent of other work on the machine."""

from __future__ import annotations

import pytest

from compressors.auto import candidates as prices
from compressors.auto.candidates import MessageCost


@pytest.fixture(autouse=True)
def prices_that_no_other_work_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressors.auto.chooser.measure_link", lambda *_: MessageCost(wave_s=1e-5, per_byte_s=1e-9))
    looked = prices.look
    monkeypatch.setattr("compressors.auto.candidates.look", lambda *given: looked(*given)._replace(seconds=1e-5))
