"""Measure how closely the forwarder's links match their settings: rate, delay and loss of datagrams, and TCP's rate.

`python -m benchmarks.forwarder OUT.csv [REPEATS]` starts two virtual hosts for every combination of rate (10 and 100
Mbit/s), one-way delay (10 and 50 ms) and loss (0, 1 and 5 %), and writes a row for each. Repeats are interleaved.
`--summary FILE` prints the medians. Round trips are measured on an idle link; rate and loss are measured under a load
of datagrams: full frames for the rate, and the smallest frames for the loss, which takes many of them. All bytes are
counted by the hosts' interfaces.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.core.counters import FRAME_BYTES, ForwarderUse, interface_bytes
from bench.core.environment import usable_cores
from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.virtual_network import VirtualNetwork

RATES_BPS = (10e6, 100e6)
LATENCIES_S = (0.01, 0.05)
LOSSES = (0.0, 0.01, 0.05)
PINGS = 50
FULL_S = 2.0
# Seconds in which a TCP window opens, and recovers from having opened too far.
OPENING_S = 3.0
# Expected number of lost frames; at this number, the relative standard deviation of the measured loss is about 2 %.
LOST = 2500
SMALLEST_FRAME = 60
UDP_HEADERS = 42
# Each socket buffers 11 ms of traffic at 100 Mbit/s; together they cover the time this process may wait for a CPU.
SOURCES = 8
CONTROL, ECHO, SINK, STREAM = 6000, 6001, 6002, 6003
ADDRESS = "10.77.0.2"
Received = Callable[[], tuple[float, float]]
COLUMNS = (
    "rate_bps", "latency_s", "loss_ratio", "udp_bps", "one_way_s", "measured_loss_ratio", "tcp_bps",
    "forwarder_cpu_share", "busy_tasks", "cores", "cpu", "kernel", "measured_at",
)  # fmt: skip


def main(out: str, repeats: str = "3") -> None:
    path = Path(out)
    cells = list(itertools.product(RATES_BPS, LATENCIES_S, LOSSES))
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for rate_bps, latency_s, loss in cells * int(repeats):
            table.writerow(measure_cell(rate_bps, latency_s, loss) | machine())
            file.flush()
    summary(path)


def measure_cell(rate_bps: float, latency_s: float, loss: float) -> dict[str, Any]:
    link = HostLink(name="host", uplink_bps=rate_bps, downlink_bps=rate_bps, latency_s=latency_s, loss=loss)
    cluster = dataclasses.replace(Cluster.uniform(2, link=link), forwarded=True)
    with tempfile.TemporaryDirectory() as folder, VirtualNetwork(cluster) as network:
        answer = Path(folder, "answer.json")
        commands = (["--sender", str(answer), str(loss)], ["--receiver"])
        start = [sys.executable, "-m", "benchmarks.forwarder"]
        hosts = [network.start(index, [*start, *command]) for index, command in enumerate(commands)]
        try:
            hosts[0].wait(timeout=120)
        finally:
            for host in hosts:
                host.kill()
        return {"rate_bps": rate_bps, "latency_s": latency_s, "loss_ratio": loss, **json.loads(answer.read_text())}


def machine() -> dict[str, Any]:
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {
        "busy_tasks": os.getloadavg()[0],
        "cores": usable_cores(),
        "cpu": cpu.partition(":")[2].strip(),
        "kernel": platform.release(),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def receiver() -> None:
    """Echo some datagrams, discard others and streams, and report on request the bytes that the interface received."""
    echo, sink = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    echo.bind((ADDRESS, ECHO))
    sink.bind((ADDRESS, SINK))  # never read: the interface counts bytes before they overflow
    threading.Thread(target=_echo, args=(echo,), daemon=True).start()
    streams = socket.create_server((ADDRESS, STREAM))
    threading.Thread(target=_swallow, args=(streams,), daemon=True).start()
    with socket.create_server((ADDRESS, CONTROL)) as server:
        control, _ = server.accept()
        with control, control.makefile("rw") as lines:
            for _ in lines:
                json.dump([time.perf_counter(), interface_bytes("exact").received], lines)
                lines.write("\n")
                lines.flush()


def _echo(echo: socket.socket) -> None:
    while True:
        datagram, asker = echo.recvfrom(16)
        echo.sendto(datagram, asker)


def _swallow(streams: socket.socket) -> None:
    stream, _ = streams.accept()
    while stream.recv(1 << 20):
        continue


def sender(answer: str, loss: str) -> None:
    control = _connect(CONTROL)
    with control, control.makefile("rw") as lines:

        def received() -> tuple[float, float]:
            """Return the receiver's clock in seconds and the bytes that its interface has received."""
            lines.write("?\n")
            lines.flush()
            moment, num_bytes = json.loads(lines.readline())
            return moment, num_bytes

        figures: dict[str, Any] = {"one_way_s": _round_trip_s() / 2}
        use = ForwarderUse()
        with _during(_datagrams()):
            time.sleep(0.5)
            use.start()
            udp_bps = _rate_bps(FULL_S, received)
            use.stop()
        figures["udp_bps"] = udp_bps / (1 - float(loss))  # the rate at the sender, before losses
        figures["forwarder_cpu_share"] = use.share
        time.sleep(1)
        if float(loss):
            figures["measured_loss_ratio"] = _loss(int(LOST / float(loss)), received)
        with _connect(STREAM) as stream, _during(lambda: stream.send(bytes(1 << 16))):
            time.sleep(OPENING_S)
            figures["tcp_bps"] = _rate_bps(FULL_S, received)
    Path(answer).write_text(json.dumps(figures))


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((ADDRESS, port), timeout=60)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _round_trip_s() -> float:
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ping:
        ping.settimeout(1)
        for number in range(PINGS):
            sent = time.perf_counter()
            ping.sendto(number.to_bytes(2), (ADDRESS, ECHO))
            with contextlib.suppress(TimeoutError):  # the datagram was lost
                if int.from_bytes(ping.recv(16)) == number:
                    times.append(time.perf_counter() - sent)
    return statistics.median(times)


@contextlib.contextmanager
def _during(send: Callable[[], object]) -> Iterator[None]:
    """Call `send` repeatedly in the background."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            send()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _rate_bps(seconds: float, received: Received) -> float:
    """Return the rate of the frames that arrive in the next `seconds`, by the receiver's clock."""
    (began, before), _, (ended, after) = received(), time.sleep(seconds), received()
    return 8 * (after - before) / (ended - began)


def _datagrams() -> Callable[[], object]:
    """Return a function that sends one full frame, and waits while the uplink is full."""
    payload = bytes(FRAME_BYTES - UDP_HEADERS)
    sources = itertools.cycle([socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(SOURCES)])
    return lambda: next(sources).sendto(payload, (ADDRESS, SINK))


def _loss(number: int, received: Received) -> float:
    """Send `number` of the smallest frames, and return the share that does not arrive."""
    payload = bytes(SMALLEST_FRAME - UDP_HEADERS)
    received()
    before, sent_before = received()[1], interface_bytes("exact").sent
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:
        source.connect((ADDRESS, SINK))
        for index in range(number):
            source.send(payload)
            if index % 64 == 0:
                time.sleep(64 / 30_000)  # as fast as one core forwards them, and slower than the link
    time.sleep(1)
    sent = interface_bytes("exact").sent - sent_before
    return 1 - (received()[1] - before) / sent


def summary(path: Path) -> None:
    """Print the medians of every combination, and their deviations from the settings."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cells = dict.fromkeys((row["rate_bps"], row["latency_s"], row["loss_ratio"]) for row in rows)
    for cell in cells:
        mine = [row for row in rows if (row["rate_bps"], row["latency_s"], row["loss_ratio"]) == cell]
        rate_bps, latency_s, loss = map(float, cell)
        median = {
            name: statistics.median(float(row[name]) for row in mine)
            for name in COLUMNS[3:8]
            if all(row[name] for row in mine)
        }
        parts = [
            f"{rate_bps / 1e6:.0f} Mbit/s, {latency_s * 1e3:.0f} ms, loss {loss:.0%}:",
            f"UDP {median['udp_bps'] / rate_bps - 1:+.1%}, delay {median['one_way_s'] / latency_s - 1:+.1%},",
            f"loss {median['measured_loss_ratio'] / loss - 1:+.1%}," if loss else "",
            f"TCP {median['tcp_bps'] / 1e6:.1f} Mbit/s, {median['forwarder_cpu_share']:.0%} of a core",
        ]
        print(" ".join(part for part in parts if part))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--receiver"]:
            receiver()
        case ["--sender", answer, loss]:
            sender(answer, loss)
        case ["--summary", path]:
            summary(Path(path))
        case arguments:
            main(*arguments)
