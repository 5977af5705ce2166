"""A bell rings from when it was rung until it is silenced."""

from __future__ import annotations

import threading
import time

from collectives.transport.base import WakeupEvent


def test_it_rings_however_often_it_was_rung_until_it_is_silenced() -> None:
    bell = WakeupEvent()
    assert not bell.is_ringing
    for rings in (1, 2, 100_000):
        for _ in range(rings):
            bell.ring()
        assert bell.is_ringing
        assert bell.is_ringing
        bell.silence()
        assert not bell.is_ringing
    bell.silence()
    bell.close()


def test_another_thread_is_heard() -> None:
    bell = WakeupEvent()
    ringer = threading.Thread(target=bell.ring)
    ringer.start()
    while not bell.is_ringing:
        time.sleep(0.001)
    ringer.join()
    bell.close()
