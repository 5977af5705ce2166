"""When a rank joins ranks that may leave, and what the launcher sees of it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from bench.core.run_folder import RunFolder
from bench.train import worker


def test_a_rank_joins_when_nothing_but_training_is_left_and_the_launcher_sees_its_first_exchange(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    folder.rendezvous.mkdir()
    monkeypatch.setenv("RANK", "1")
    scene = Mock()
    scene.load.return_value = None, None
    monkeypatch.setattr(worker, "_data_and_state", scene.load)
    monkeypatch.setattr(worker, "Trainer", scene.trainer)
    config = Mock(profile=0, save_model=False)
    worker._train(config, folder, scene.strategy, Mock(), Mock(), Mock(), Mock(), None)
    assert [name for name, *_ in scene.mock_calls] == ["load", "strategy.join", "trainer", "trainer().run"]
    assert not folder.joined(1).exists()
    scene.strategy.join.call_args.kwargs["has_joined"]()
    assert folder.joined(1).exists()
