"""The probe: measure the real rates of the links between virtual hosts, in a fraction of a second before training.

All hosts send a long message at the same time, each to its neighbour as in a ring all-reduce, so that every link is
loaded in both directions. Short messages are sent one after the other, so that they show the link and not the wait for
a processor. Rates include frame headers (they come from the kernel's counters of an interface), so they are comparable
with the configured rates; the rate of the payload is 4 to 5 % lower. On links that lose frames, the long message is a
series of datagrams. On a link with a trace, TCP's rate is measured but not checked, because this rate depends on the
moment. Losses on such a link are not measured, because the number of frames that a full queue drops also depends on the
moment.
"""

import contextlib
import dataclasses
import math
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Self

from bench.core.counters import FRAME_BYTES, Counters, WireHeaders, interface_bytes
from bench.core.errors import RunFailed
from bench.hosts.cluster import Cluster
from bench.hosts.link_report import SHORT_MESSAGE_BYTES, Flow, NetworkReport, link_warnings
from bench.hosts.network import congestion_warnings, namespace, start_in

# With a loss of 1 %, 20 lost datagrams are expected per host.
_NUM_DATAGRAMS = 2000
_LEAST_S = 0.5
_UNLIMITED_BPS = 100e6
_HEADER_BYTES = 42  # Ethernet 14, IPv4 20, UDP 8
_LEAST_FRAME_BYTES = 60
_PACE_S = 1e-3
_DATAGRAM_SILENCE_S = 0.5


@dataclasses.dataclass(frozen=True)
class DatagramSeries:
    """A series of UDP datagrams of the same size, by which rate and losses of a link are measured.

    Attributes:
        number: number of datagrams.
        frame_bytes: size of each datagram's frame in bytes, including headers.
        rate_bps: rate at which the datagrams are sent, in bits per second including headers.
    """

    number: int
    frame_bytes: int
    rate_bps: float

    @classmethod
    def at(cls, rate_bps: float | None) -> Self:
        """Return the series for a link of this rate; sending it takes 0.5 s, longer on slow links.

        Args:
            rate_bps: the link's rate in bits per second, including headers; None: not limited, so 100 Mbit/s are used.
        """
        rate_bps = rate_bps or _UNLIMITED_BPS
        num_bytes = rate_bps / 8 * _LEAST_S
        frame_bytes = min(max(int(num_bytes / _NUM_DATAGRAMS), _LEAST_FRAME_BYTES), FRAME_BYTES)
        return cls(max(_NUM_DATAGRAMS, int(num_bytes / frame_bytes)), frame_bytes, rate_bps)

    def send(self, address: str, port: int) -> None:
        """Send the series at its rate to a UDP port, whether or not a process listens there."""
        payload = bytes(self.frame_bytes - _HEADER_BYTES)
        per_second = self.rate_bps / 8 / self.frame_bytes
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:
            source.connect((address, port))
            began, sent = time.perf_counter(), 0
            while sent < self.number:
                due = min(self.number, 1 + int((time.perf_counter() - began) * per_second))
                for _ in range(due - sent):
                    source.send(payload)
                sent = due
                time.sleep(_PACE_S)

    def receive(self, timeout_s: float) -> tuple[int, float]:
        """Count the datagrams that arrive on this thread's interface, until none has arrived for half a second.

        Args:
            timeout_s: longest wait for the first datagram, in seconds.

        Returns:
            (number of datagrams that arrived, rate in bits per second of the whole series including lost datagrams)

        Raises:
            RunFailed: no datagram arrived.
        """
        before = interface_bytes("exact").received
        began = changed = time.perf_counter()
        first, last = None, before
        while (now := time.perf_counter()) - changed < (_DATAGRAM_SILENCE_S if first is not None else timeout_s):
            seen = interface_bytes("exact").received
            if seen > last:
                first, began = (seen, now) if first is None else (first, began)
                last, changed = seen, now
            time.sleep(_PACE_S)
        if first is None:
            raise RunFailed("no datagram arrived")
        num_received = round((last - before) / self.frame_bytes)
        share = num_received / self.number
        return num_received, 8 * (last - first) / share / max(changed - began, _PACE_S)


_SILENCE_S = 0.2
_LONG_MESSAGE_S = 0.25
# TCP's window doubles once per round trip; it should be fully open in the second half of the message.
_LONG_MESSAGE_ROUND_TRIPS = 8
_MIN_LONG_BYTES = 200_000
_MAX_LONG_BYTES = 64_000_000
_NUM_PINGS = 11
_SLOW_BPS = 10e6
_PORT = 5000
_TIMEOUT_S = 120.0
_ZEROS = memoryview(bytes(_MAX_LONG_BYTES))  # uses almost no memory: the kernel maps one page of zeros everywhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LinkTest:
    """One connection to be measured, from a sending host to a receiving host.

    Attributes:
        sender, receiver: indices of the two hosts.
        address: the receiver's IPv4 address.
        long_bytes: size of the long message over TCP, in bytes.
        configured_bps: rate in bits per second; None: not limited, or limited by a trace.
        headers: "exact" if the interfaces count all headers, "estimated" if some headers must be added.
        sender_is_slower: True to count frames at the sender's interface, because the receiver's link is faster and may
            also carry what other hosts send.
        datagrams: series to send as the long message, if a host of the cluster loses frames and no trace limits the
            rate; None: the long message is sent over TCP.
    """

    sender: int
    receiver: int
    address: str
    long_bytes: int
    configured_bps: float | None
    headers: WireHeaders
    sender_is_slower: bool
    datagrams: DatagramSeries | None


def measure(cluster: Cluster, congestion_control: str) -> NetworkReport:
    """Measure all links of a cluster whose network has been set up, and return the report with warnings.

    Args:
        cluster: the hosts and their links.
        congestion_control: name of TCP's congestion control on the hosts, for the report.

    Raises:
        RunFailed: a host cannot reach its neighbour.
    """
    num_hosts = len(cluster.hosts)
    # One direction of the ring is enough if all links are equal. With two hosts, one direction is both directions.
    steps = (1,) if cluster.is_uniform or num_hosts == 2 else (1, num_hosts - 1)
    flows = [
        flow
        for step in steps
        for flow in measure_flows(cluster, [(host, (host + step) % num_hosts) for host in range(num_hosts)])
    ]
    num_datagrams = sum(flow.num_sent for flow in flows)
    num_received = sum(flow.num_received for flow in flows)
    names = [host.name for host in cluster.hosts]

    def alone(flow: Flow) -> Flow:
        return measure_flows(cluster, [(names.index(flow.sender), names.index(flow.receiver))])[0]

    return NetworkReport(
        measured_bandwidth_bps=min(flow.long_bps for flow in flows),
        measured_rtt_s=statistics.median(flow.rtt_s for flow in flows),
        measured_loss_ratio=1 - num_received / num_datagrams if num_datagrams else None,
        wire_headers=cluster.wire_headers,
        congestion_control=congestion_control,
        warnings=(*congestion_warnings(congestion_control), *link_warnings(cluster, flows, alone)),
        flows=tuple(flows),
    )


def measure_flows(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> list[Flow]:
    """Measure several connections at the same time, and return one `Flow` for each.

    Args:
        cluster: the hosts and their links; the network has been set up.
        pairs: (index of the sending host, index of the receiving host) of each connection; a host may be the receiver
            of at most one connection.

    Raises:
        RunFailed: a host cannot reach another.
    """
    in_step = threading.Barrier(2 * len(pairs), timeout=_TIMEOUT_S)
    one_at_a_time = threading.Lock()
    running: list[tuple[_LinkTest, Future[tuple[float, float]], Future[tuple[int, float, float, float]]]] = []
    for sender, receiver in pairs:
        test = _link_test(cluster, sender, receiver)
        listening: Future[None] = Future()
        # Hosts with slow links send short messages at the same time: processors are fast enough for these, and a
        # hundred messages one after the other would take minutes.
        slow = test.configured_bps is not None and test.configured_bps < _SLOW_BPS
        exclusive = contextlib.nullcontext() if slow else one_at_a_time
        received = start_in(namespace(receiver), partial(_receive, test, in_step, listening))
        sent = start_in(namespace(sender), partial(_send, test, in_step, exclusive, listening))
        running.append((test, sent, received))
    names = [host.name for host in cluster.hosts]
    for test, sent, received in running:
        for error in (sent.exception(), received.exception()):
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise RunFailed(
                    f"virtual host {names[test.sender]} cannot reach {names[test.receiver]}: "
                    f"{error or type(error).__name__}"
                )
    flows = []
    for test, sent, received in running:
        rtt_s, short_start_s = sent.result()
        num_received, long_bps, short_end_s, short_bytes = received.result()
        flows.append(
            Flow(
                sender=names[test.sender],
                receiver=names[test.receiver],
                configured_bps=test.configured_bps,
                long_bps=long_bps,
                short_bps=8 * short_bytes / (short_end_s - short_start_s),
                rtt_s=rtt_s,
                num_sent=test.datagrams.number if test.datagrams else 0,
                num_received=num_received,
            )
        )
    return flows


def _link_test(cluster: Cluster, sender: int, receiver: int) -> _LinkTest:
    source, target = cluster.hosts[sender], cluster.hosts[receiver]
    rate_bps = min((rate for rate in (source.mean_rates[0], target.mean_rates[1]) if rate is not None), default=None)
    by_trace = source.uplink_trace or target.downlink_trace
    round_trip_s = source.latency_s + target.latency_s
    wanted_bytes = (
        math.inf if rate_bps is None else rate_bps / 8 * (_LONG_MESSAGE_S + _LONG_MESSAGE_ROUND_TRIPS * round_trip_s)
    )
    return _LinkTest(
        sender=sender,
        receiver=receiver,
        address=cluster.address(receiver),
        long_bytes=int(min(max(wanted_bytes, _MIN_LONG_BYTES), _MAX_LONG_BYTES)),
        configured_bps=None if by_trace else rate_bps,
        headers=cluster.wire_headers,
        sender_is_slower=rate_bps is not None and rate_bps != target.mean_rates[1],
        datagrams=DatagramSeries.at(rate_bps) if any(host.loss for host in cluster.hosts) and not by_trace else None,
    )


def _receive(test: _LinkTest, in_step: threading.Barrier, listening: Future[None]) -> tuple[int, float, float, float]:
    """Receive the long and the short message of a connection and measure them.

    Returns:
        (number of datagrams received, 0 with TCP; rate of the long message in bits per second; `time.perf_counter()` at
        which the short message was complete; bytes of the short message's frames)
    """
    try:
        with (
            socket.create_server((test.address, _PORT)) as server,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sink,
        ):
            sink.bind((test.address, _PORT))  # accepts datagrams unread: a closed port would answer each with an error
            server.settimeout(_TIMEOUT_S)
            listening.set_result(None)
            connection, _ = server.accept()
            with connection:
                connection.settimeout(_TIMEOUT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(_NUM_PINGS):
                    _read(connection, 1)
                    connection.sendall(b".")
                in_step.wait()
                long = test.datagrams.receive(_TIMEOUT_S) if test.datagrams else _receive_long(connection, test)
                in_step.wait()
                _read(connection, 1)
                bytes_before = interface_bytes(test.headers).received
                connection.sendall(b".")
                _read(connection, SHORT_MESSAGE_BYTES)
                ended, num_bytes = time.perf_counter(), interface_bytes(test.headers).received - bytes_before
                connection.sendall(b".")
                return *long, ended, num_bytes
    except BaseException:
        in_step.abort()
        raise
    finally:
        if not listening.done():
            listening.set_exception(RunFailed("it does not listen"))


def _receive_long(connection: socket.socket, test: _LinkTest) -> tuple[int, float]:
    """Receive a long message over TCP; return (0 datagrams, bits per second of the message's second half)."""
    host, passed = (test.sender, "sent") if test.sender_is_slower else (test.receiver, "received")
    with contextlib.closing(start_in(namespace(host), partial(Counters, test.headers)).result()) as counters:
        half = test.long_bytes // 2
        _read(connection, half)
        bytes_before, began = getattr(counters.read(), passed), time.perf_counter()
        _read(connection, test.long_bytes - half)
        ended, num_bytes = time.perf_counter(), getattr(counters.read(), passed) - bytes_before
    return 0, 8 * num_bytes / (ended - began)


def _send(
    test: _LinkTest,
    in_step: threading.Barrier,
    exclusive: contextlib.AbstractContextManager[object],
    listening: Future[None],
) -> tuple[float, float]:
    """Measure the round trip time of a connection, then send the long and the short message.

    Returns:
        (median round trip time in seconds, `time.perf_counter()` at which the short message began)
    """
    try:
        listening.result(_TIMEOUT_S)
        with socket.create_connection((test.address, _PORT), timeout=_TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            round_trips = []
            for _ in range(_NUM_PINGS):
                sent = time.perf_counter()
                connection.sendall(b".")
                _read(connection, 1)
                round_trips.append(time.perf_counter() - sent)
            in_step.wait()
            if test.datagrams:
                test.datagrams.send(test.address, _PORT)
            else:
                connection.sendall(_ZEROS[: test.long_bytes])
            in_step.wait()
            time.sleep(_SILENCE_S)
            with exclusive:
                connection.sendall(b".")
                _read(connection, 1)  # the receiver counts from here on
                short_start_s = time.perf_counter()
                connection.sendall(_ZEROS[:SHORT_MESSAGE_BYTES])
                _read(connection, 1)
            return statistics.median(round_trips), short_start_s
    except BaseException:
        in_step.abort()
        raise


def _read(connection: socket.socket, num_bytes: int) -> None:
    """Receive exactly `num_bytes` bytes and discard them."""
    buffer = bytearray(min(num_bytes, 1 << 20))
    while num_bytes > 0:
        received = connection.recv_into(buffer, min(num_bytes, len(buffer)))
        if received == 0:
            raise ConnectionError("the connection was closed")
        num_bytes -= received
