"""Refusals of `bench calibrate` and `bench predict` before they import torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_startup import assert_refused_where_torch_is_broken
from tests.extensions.predict.calibrations import written


def test_a_wrong_component_is_refused_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    assert_refused_where_torch_is_broken({
        "calibrate --batch-size 5000": "is larger than a rank's shard",
        "calibrate --compressors auto": "auto works through DDP's own hook",
        "predict --compressor nope": "there is no compressor 'nope'",
    }, tmp_path)  # fmt: skip
