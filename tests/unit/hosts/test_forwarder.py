"""The forwarder without a network: socket pairs replace TAP devices, so that every frame can be followed.

No frame may arrive too early, on however busy a machine; late frames are measured in benchmarks.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.hosts.cluster import HostLink, Trace
from bench.hosts.forwarder.forwarder import Forwarder, LinkDirection, found
from bench.hosts.network import ethernet_address

pytestmark = pytest.mark.skipif(found().handle is None, reason=f"there is no forwarder: {found().finding}")

NS_PER_MS = 1_000_000
FRAME = 1514
EVERYBODY = "ff:ff:ff:ff:ff:ff"
ADDRESS_RESOLUTION = b"\x08\x06"


class FrameCounts(NamedTuple):
    forwarded: int
    lost: int
    dropped: int


class Net:
    """A running forwarder and the far ends of its hosts' sockets."""

    def __init__(self, *links: HostLink, seed: int = 1) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in links]
        self.ends = [end for _, end in pairs]
        for near, _ in pairs:
            near.setblocking(False)
        self.forwarder = Forwarder(links, [near.detach() for near, _ in pairs], seed=seed)

    def send(self, sender: int, to: str, number: int, kind: bytes = b"\x08\x00", length: int = 60) -> None:
        header = bytes.fromhex((to + ethernet_address(sender)).replace(":", "")) + kind
        self.ends[sender].send((header + number.to_bytes(4)).ljust(length, b"\0"))

    def receive(self, host: int) -> int:
        return int.from_bytes(self.ends[host].recv(2048)[14:18])

    def counts(self) -> list[FrameCounts]:
        return [FrameCounts(host.forwarded, host.lost, host.dropped) for host in self.forwarder.hosts]

    def counted(self, host: int, total: int) -> FrameCounts:
        """Return the counts of a host after `total` of its frames have been processed."""
        while sum(counts := self.counts()[host]) < total:
            time.sleep(0.001)
        return counts

    def close(self) -> None:
        self.forwarder.close()
        for end in self.ends:
            end.close()


MakeNet = Callable[..., Net]


@pytest.fixture
def net() -> Iterator[MakeNet]:
    made: list[Net] = []

    def make(*links: HostLink, seed: int = 1) -> Net:
        made.append(Net(*links, seed=seed))
        return made[-1]

    yield make
    for each in made:
        each.close()


PLAIN = HostLink(name="plain")


def test_a_frame_goes_to_its_receiver_alone_and_a_broadcast_to_all_others(net: MakeNet) -> None:
    three = net(PLAIN, PLAIN, PLAIN)
    three.send(0, ethernet_address(2), 1)
    three.send(1, EVERYBODY, 2)
    three.send(1, ethernet_address(0), 3)
    three.send(2, ethernet_address(1), 4)
    assert [three.receive(2), three.receive(2)] in ([1, 2], [2, 1])
    assert [three.receive(0), three.receive(0)] == [2, 3]
    assert three.receive(1) == 4


def test_frames_to_nobody_are_forgotten(net: MakeNet) -> None:
    pair = net(PLAIN, PLAIN)
    for address in (ethernet_address(0), ethernet_address(2), ethernet_address(65_000), "00:00:00:00:00:00"):
        pair.send(0, address, 1)
    pair.ends[0].send(b"\xff" * 13)
    pair.send(0, ethernet_address(1), 2)
    assert pair.receive(1) == 2


def test_nothing_comes_before_its_time(net: MakeNet) -> None:
    pair = net(HostLink(name="far", latency_s=0.03), PLAIN)
    began = time.monotonic()
    pair.send(0, ethernet_address(1), 1)
    pair.receive(1)
    assert time.monotonic() - began >= 0.03
    pair.send(1, ethernet_address(0), 2)  # the other direction has its own delay: none
    pair.receive(0)


def test_a_downlink_takes_its_time_and_keeps_the_order(net: MakeNet) -> None:
    pair = net(PLAIN, HostLink(name="slow", downlink_bps=10e6))
    began = time.monotonic()
    for number in range(20):
        pair.send(0, ethernet_address(1), number, length=FRAME)
    assert [pair.receive(1) for _ in range(20)] == list(range(20))
    assert time.monotonic() - began >= 20 * FRAME * 8 / 10e6


def test_frames_that_are_delayed_unequally_keep_their_order(net: MakeNet) -> None:
    pair = net(HostLink(name="shaky", latency_s=0.0002, jitter_s=0.0002), PLAIN)  # another delay every 2 ms
    for number in range(100):
        pair.send(0, ethernet_address(1), number)
        time.sleep(0.0001)
    assert [pair.receive(1) for _ in range(100)] == list(range(100))


def lost(pair: Net, number: int) -> set[int]:
    """Return which of the first host's next frames do not arrive."""
    before = pair.counts()[0]
    for each in range(number):
        pair.send(0, ethernet_address(1), each)
    counts = pair.counted(0, before.forwarded + before.lost + number)
    return set(range(number)) - {pair.receive(1) for _ in range(counts.forwarded - before.forwarded)}


def test_losses_are_each_for_itself_and_repeat_with_the_seed(net: MakeNet) -> None:
    lossy = HostLink(name="lossy", loss=0.1)
    pair = net(lossy, PLAIN, seed=1)
    first = lost(pair, 150)
    assert 4 <= len(first) <= 30
    assert lost(pair, 150) != first
    pair.forwarder.restart(1)
    assert lost(pair, 150) == first
    assert lost(net(lossy, PLAIN, seed=1), 150) == first
    second = lost(net(lossy, PLAIN, seed=2), 150)
    assert second != first
    pair.forwarder.restart(2)
    assert lost(pair, 150) == second


def test_almost_all_frames_are_lost_where_that_was_asked_for_but_address_resolution_never(net: MakeNet) -> None:
    pair = net(HostLink(name="lossy", loss=1 - 1e-12), PLAIN)
    for number in range(20):
        pair.send(0, ethernet_address(1), number)
    assert pair.counted(0, 20) == FrameCounts(forwarded=0, lost=20, dropped=0)
    for number in range(20):
        pair.send(0, EVERYBODY, number, kind=ADDRESS_RESOLUTION)
    assert [pair.receive(1) for _ in range(20)] == list(range(20))


def test_a_full_queue_drops(net: MakeNet) -> None:
    pair = net(PLAIN, HostLink(name="slow", downlink_bps=100e3))  # the queue holds 64 kB, which take 5 s
    for number in range(100):
        pair.send(0, ethernet_address(1), number, length=FRAME)
    counts = pair.counted(0, 100)
    assert (counts.lost, counts.dropped) == (0, pytest.approx(100 - 65536 // FRAME, abs=1))


def test_a_frame_that_its_receiver_does_not_take_counts_once_as_dropped_and_its_senders(net: MakeNet) -> None:
    three = net(PLAIN, PLAIN, PLAIN)
    three.ends[1].close()
    three.send(0, EVERYBODY, 1)
    three.send(0, ethernet_address(1), 2)
    three.send(0, ethernet_address(2), 3)
    assert [three.receive(2), three.receive(2)] == [1, 3]  # of due frames, host 1 gets its own before host 2
    assert three.counts() == [FrameCounts(2, 0, 2), FrameCounts(0, 0, 0), FrameCounts(0, 0, 0)]


def trace(tmp_path: Path, opportunities: list[int]) -> Trace:
    path = tmp_path / "trace"
    path.write_text("".join(f"{each}\n" for each in opportunities), encoding="ascii")
    return Trace.of(path)


def by_the_millisecond(opportunities: list[int], frames: list[tuple[int, int]]) -> list[int]:
    """Return the departures of frames (arrival in ns, length), by the definition of the trace's authors."""
    left: list[int] = []
    sent, moment = 0, 0
    for index in range(10**6):
        period, place = divmod(index, len(opportunities))
        moment = (period * opportunities[-1] + opportunities[place]) * NS_PER_MS
        room = FRAME
        while len(left) < len(frames) and frames[len(left)][0] <= moment and room > 0:
            used = min(room, frames[len(left)][1] - sent)
            sent, room = sent + used, room - used
            if sent == frames[len(left)][1]:
                left.append(moment)
                sent = 0
        if len(left) == len(frames):
            return left
    raise AssertionError("the trace was too slow")


@pytest.mark.parametrize("seed", range(20))
def test_frames_leave_at_the_opportunities_of_a_trace(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    opportunities = [*sorted(dice.choices(range(dice.choice((3, 30, 300))), k=dice.choice((1, 5, 50)))), 300]
    arrivals = [dice.randrange(2000 * NS_PER_MS) for _ in range(150)]
    at_the_very_moment = [(dice.randrange(7) * 300 + dice.choice(opportunities)) * NS_PER_MS for _ in range(50)]
    arrivals += at_the_very_moment
    frames = list(zip(sorted(arrivals), (dice.choice((60, 700, FRAME)) for _ in arrivals), strict=True))
    left = LinkDirection(None, trace(tmp_path, opportunities)).departures(*map(list, zip(*frames, strict=True)))
    assert left == by_the_millisecond(opportunities, frames)


def test_frames_leave_a_rate_one_after_the_other() -> None:
    left = LinkDirection(8e6, None).departures([0, 0, 5 * NS_PER_MS], [1000, 500, 1000])
    assert left == [1 * NS_PER_MS, 3 * NS_PER_MS // 2, 6 * NS_PER_MS]


def test_a_trace_begins_anew_with_the_job(net: MakeNet, tmp_path: Path) -> None:
    pair = net(HostLink(name="cell", uplink_trace=trace(tmp_path, [50, *[600_000] * 5000])), PLAIN)
    time.sleep(0.06)  # the first opportunity has passed
    pair.forwarder.restart(1)
    began = time.monotonic()
    pair.send(0, ethernet_address(1), 1)
    pair.receive(1)
    assert 0.04 < time.monotonic() - began < 500
