"""The set-up and clean-up of a rank around its work."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import torch

from bench.rank.process import process_group
from collectives.transport.base import TransportError


def test_who_loses_a_rank_while_ranks_meet_says_so_as_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer_and_be_gone() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1)

        threading.Thread(target=answer_and_be_gone, daemon=True).start()
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": listener.getsockname()[1]}
        for name, value in (where | {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}).items():
            monkeypatch.setenv(name, str(value))
        with (
            pytest.raises(TransportError, match="a rank was lost while ranks connected: "),
            process_group(torch.device("cpu"), timeout_s=1.0),
        ):
            pass
        listener.shutdown(socket.SHUT_RDWR)


def test_a_network_device_that_there_is_not_is_no_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BENCH_INIT_METHOD", f"file://{tmp_path}/store")
    for name, value in {"GLOO_SOCKET_IFNAME": "nowhere0", "RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RuntimeError, match="nowhere0") as caught, process_group(torch.device("cpu"), timeout_s=1.0):
        pass
    assert not isinstance(caught.value, TransportError)
