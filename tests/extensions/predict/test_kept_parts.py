"""Parts of a calibration that are kept until it is complete."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.core.errors import Interrupted, RunFailed
from bench.extensions.predict import calibrating
from bench.extensions.predict.calibrating import KeptParts, execute
from bench.extensions.predict.options import CalibrateConfig

CONFIG = CalibrateConfig(bucket_mb=1.0, virtual_hosts=False)


def test_parts_are_found_again_by_the_same_measurement_alone(tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    kept = KeptParts(out, CONFIG)
    assert kept.said == "no part was measured yet"
    kept.add({"part": "encoding by topk", "found": {"encoded": {}}})
    assert kept.said == f"1 part(s) are kept in {out}.parts; run the same command again to continue from there"
    more = dataclasses.replace(CONFIG, compressors="topk,bf16", timeout_s=9.0)
    assert list(KeptParts(out, more).parts) == ["encoding by topk"]
    assert KeptParts(out, more).parts == kept.parts
    assert kept.parts["encoding by topk"]["seconds"] > 0
    for other in ({"model": "resnet20"}, {"turns": 9}, {"budget": "1h"}, {"seed": 7}):
        assert KeptParts(out, dataclasses.replace(CONFIG, **other)).parts == {}
    kept.path.unlink()
    assert KeptParts(out, CONFIG).parts == {}
    kept.path.write_text('{"of": ')
    assert KeptParts(out, CONFIG).parts == {}


@pytest.mark.parametrize("error", [Interrupted("stopped by the user; the rows so far are kept"), RunFailed("it broke")])
def test_whoever_is_stopped_reads_what_is_kept(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptParts(tmp_path / "parts.json", CONFIG)
    kept.add({"part": "one rank computing", "found": {}})

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(calibrating, "_measure_parts", fails)
    with pytest.raises(type(error)) as told:
        execute(CONFIG, print, None, kept)  # type: ignore[arg-type]
    reason = "it broke" if isinstance(error, RunFailed) else "stopped by the user"
    assert str(told.value) == f"{reason}; {kept.said}"
