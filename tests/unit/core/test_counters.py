"""Interface counters: the kernel's table is parsed correctly, and headers that offloading hides are added."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.core import counters
from bench.core.counters import InterfaceBytes, parse_counters

# bytes, packets, then six other counters, first of received and then of sent frames
TABLE = """Inter-|   Receive  |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 9999999 999 0 0 0 0 0 0 9999999 999 0 0 0 0 0 0
  eth0:{received} {received_packets} 0 0 0 0 0 0 {sent} {sent_packets} 0 0 0 0 0 0
"""


def test_exact_counters_are_taken_as_they_are_and_the_loopback_is_left_out() -> None:
    text = TABLE.format(received=1000, received_packets=10, sent=2000, sent_packets=20)
    assert parse_counters(text, "exact") == InterfaceBytes(sent=2000, received=1000)


def test_packets_of_many_frames_get_their_headers_back() -> None:
    num_packets, frames_per_packet = 100, 44
    payload = num_packets * frames_per_packet * 1448
    text = TABLE.format(received=66 * 7, received_packets=7, sent=payload + 66 * num_packets, sent_packets=num_packets)
    on_the_wire = parse_counters(text, "estimated")
    assert on_the_wire.sent == pytest.approx(num_packets * frames_per_packet * 1514)
    assert on_the_wire.received == 66 * 7


def test_real_frames_are_not_estimated_twice() -> None:
    text = TABLE.format(received=1514 * 50, received_packets=50, sent=0, sent_packets=0)
    assert parse_counters(text, "estimated").received == pytest.approx(1514 * 50)


@pytest.mark.parametrize(("variable", "sent"), [(None, 14546), ("exact", 14546), ("estimated", 15140)])
def test_the_environment_of_a_virtual_host_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str | None, sent: float
) -> None:
    table = tmp_path / "dev"
    table.write_text(TABLE.format(received=0, received_packets=0, sent=14546, sent_packets=1), encoding="ascii")
    monkeypatch.setattr(counters, "_COUNTERS", table)
    monkeypatch.delenv(counters.WIRE_HEADERS_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(counters.WIRE_HEADERS_VARIABLE, variable)
    assert counters.interface_bytes().sent == pytest.approx(sent, abs=1)


def test_this_machine_has_counters() -> None:
    assert counters.interface_bytes().sent >= 0
