"""Doorbells: who runs answers, who is out of reach does not."""

from __future__ import annotations

import socket

import pytest

from collectives.doorbell import open_doorbell, ring_all


def test_who_runs_answers_and_who_is_gone_or_stopped_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    running = open_doorbell()
    assert running is not None
    with socket.create_server(("127.0.0.1", 0)) as stopped, socket.create_server(("127.0.0.1", 0)) as gone:
        silent, closed = stopped.getsockname(), gone.getsockname()
        gone.close()
        assert ring_all({0: running, 1: silent, 2: closed}, within_s=0.4) == {0}


def test_without_a_meeting_point_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert open_doorbell() is None
