"""A run that was stopped in silence: what its ranks left says why, otherwise how long nothing was heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.core.run_folder import RunFolder, write_json
from bench.launch import run, torchrun
from bench.launch.torchrun import Ending
from tests.configs import make_config

REPORT = {"rank": 0, "time": 1.0, "message": "rank 1 is late", "lost_a_peer": True}


@pytest.mark.parametrize(
    ("report", "status", "sentence"),
    [
        (REPORT, "failed", "rank 0: rank 1 is late"),
        (None, "timeout", "no step ended within 7 s; raise --timeout if the link is that slow"),
    ],
    ids=["a rank knew", "nobody knew"],
)
def test_a_silent_run_is_explained(
    report: dict[str, Any] | None, status: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(_config: object, folder: RunFolder) -> None:
        if report:
            write_json(folder.error_of(0), report)

    monkeypatch.setattr(torchrun, "launch", launch)
    monkeypatch.setattr(torchrun, "watch", lambda *_: Ending(exit_code=1, silent_s=7.0))
    result = run.execute(make_config(), tmp_path, lambda _: None)
    assert (result.status, result.error) == (status, sentence)
