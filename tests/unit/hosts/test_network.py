"""Commands given to the kernel, as text, and its congestion control; tests/hosts checks their effect."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.hosts import network
from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.network import CONGESTION_CONTROL, _write, congestion_warnings

FRAME = 1514


@pytest.mark.parametrize(
    ("rate_bps", "real_frames", "burst"),
    [
        (1e6, True, 2 * FRAME),
        (10e6, True, 2 * FRAME),
        (30e6, True, 3750),
        (100e6, True, 3 * FRAME),
        (1e9, False, 125_000),
        (10e9, False, 1_250_000),
        (1e6, False, 2 * FRAME),
    ],
)
def test_burst(rate_bps: float, real_frames: bool, burst: int) -> None:
    assert network.burst_bytes(rate_bps, real_frames=real_frames) == burst


@pytest.mark.parametrize(
    ("link", "real_frames", "commands"),
    [
        # a token bucket with a queue of 200 ms
        ({"uplink_bps": 100e6}, True, ["root handle 1: tbf rate 100000000bit burst 4542 limit 2504542"]),
        # delay and loss sit below the rate, with room for what is under way
        (
            {"uplink_bps": 10e6, "downlink_bps": 10e6, "latency_s": 0.1, "loss": 0.001},
            True,
            [
                "root handle 1: tbf rate 10000000bit burst 3028 limit 253028",
                "parent 1:1 handle 10: netem limit 348 delay 100000us loss 0.100000%",
            ],
        ),
        # without a rate, the delay is the root
        ({"latency_s": 0.002}, False, ["root handle 10: netem limit 100000 delay 2000us"]),
    ],
)
def test_commands_of_an_uplink(link: dict[str, float], real_frames: bool, commands: list[str]) -> None:
    host = HostLink(name="a", **link)  # type: ignore[arg-type]
    made = [" ".join(command) for command in network.uplink_commands("eth0", host, real_frames=real_frames)]
    assert made == [f"tc qdisc add dev eth0 {command}" for command in commands]
    downlink = network.rate_commands("port0", host.downlink_bps, real_frames=real_frames)
    assert len(downlink) == (host.downlink_bps is not None)


@pytest.mark.parametrize(("rate_bps", "segmented"), [(100e6, True), (1e9, False)])
def test_segmentation_is_switched_off_on_both_ends_of_slow_links(rate_bps: float, segmented: bool) -> None:
    cluster = Cluster.uniform(3, link=HostLink(name="any", uplink_bps=rate_bps, downlink_bps=rate_bps))
    off = [command for command in network.link_commands(cluster) if "gso_max_segs" in command]
    assert len(off) == (6 if segmented else 0)


def test_packets_of_fast_links_are_as_large_as_their_rate_limiter_lets_through_whole() -> None:
    rates = (341e6, 1e9, 20e6, None)
    hosts = tuple(HostLink(name=f"h{index}", uplink_bps=rate, downlink_bps=rate) for index, rate in enumerate(rates))
    limited = {line[2]: line[-2] for line in network.link_commands(Cluster(hosts=hosts)) if "gso_max_segs" in line}
    assert limited == {"bench0": "28", "bench2": "2"}
    assert 28 * FRAME <= network.burst_bytes(341e6, real_frames=False) < 29 * FRAME


def test_each_host_gets_its_own_address_and_rates() -> None:
    hosts = (HostLink(name="a", uplink_bps=1e6, downlink_bps=2e6), HostLink(name="b", uplink_bps=3e6, downlink_bps=4e6))
    lines = [" ".join(command) for command in network.link_commands(Cluster(hosts=hosts))]
    assert "ip -n bench1 addr add 10.77.0.2/24 dev eth0" in lines
    rates = [line.partition(" limit ")[0] for line in lines if " tbf " in line]
    assert rates == [
        "tc -n bench0 qdisc add dev eth0 root handle 1: tbf rate 1000000bit burst 3028",
        "tc qdisc add dev port0 root handle 1: tbf rate 2000000bit burst 3028",
        "tc -n bench1 qdisc add dev eth0 root handle 1: tbf rate 3000000bit burst 3028",
        "tc qdisc add dev port1 root handle 1: tbf rate 4000000bit burst 3028",
    ]


def test_of_a_forwarded_link_the_kernel_makes_the_uplinks_rate_alone() -> None:
    link = HostLink(name="any", uplink_bps=10e6, downlink_bps=20e6, latency_s=0.01, loss=0.1)
    cluster = dataclasses.replace(Cluster.uniform(2, link=link), forwarded=True)
    lines = [" ".join(command) for command in network.link_commands(cluster)]
    assert [line for line in lines if "tc " in line] == [
        f"tc -n bench{index} qdisc add dev eth0 root handle 1: tbf rate 10000000bit burst 3028 limit 253028"
        for index in range(2)
    ]
    assert (
        "ip -n bench1 link set eth0 address 02:00:00:00:00:02 txqueuelen 10000 gso_max_size 1514 gso_max_segs 1 up"
        in lines
    )
    assert not any("veth" in line or "bridge" in line for line in lines)


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
