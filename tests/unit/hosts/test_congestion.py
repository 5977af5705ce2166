"""A congestion control that could not be set is reported; the right one is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.hosts.network import CONGESTION_CONTROL, _write, congestion_warnings


def test_the_setting_is_written_and_read_back(tmp_path: Path) -> None:
    setting = tmp_path / "setting"
    setting.write_text("bbr\n", encoding="ascii")
    assert congestion_warnings(_write(setting)) == []
    assert setting.read_text(encoding="ascii") == CONGESTION_CONTROL


def test_a_setting_that_cannot_be_written_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "setting"
    setting.write_text("bbr\n", encoding="ascii")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    (warning,) = congestion_warnings(_write(setting))
    assert "congestion control (bbr), as reno could not be set" in warning
