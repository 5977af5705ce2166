"""Clusters and traces: a user's texts become the intended figures or an error message; no namespace is created."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.core.config.run import RanksConfig
from bench.core.errors import UsageError
from bench.hosts.cluster import Cluster, HostLink, Trace
from bench.hosts.cluster_options import PRESETS, cluster_from_options, cluster_from_toml

EDGE = """
ranks_per_host = 2

[[host]]
name = "rack"
count = 3
bandwidth = "100mbit"

[[host]]
name = "edge"
uplink = "20mbit"
downlink = "50mbit"
latency = "5ms"
jitter = "1ms"
loss = "1%"
cpu_share = 0.5
"""


def requested(**options: Any) -> Cluster | None:
    return cluster_from_options(RanksConfig(**options))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "edge.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_bandwidth_sets_both_directions_of_every_host() -> None:
    cluster = requested(hosts=3, ranks_per_host=2, bandwidth="100mbit")
    assert cluster is not None
    assert [host.name for host in cluster.hosts] == ["host0", "host1", "host2"]
    assert {(host.uplink_bps, host.downlink_bps) for host in cluster.hosts} == {(100e6, 100e6)}
    assert (cluster.world_size, cluster.is_uniform, cluster.wire_headers) == (6, True, "exact")
    assert [cluster.address(index) for index in range(3)] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert cluster.describe() == ["3 hosts, each: up 100 Mbit/s, down 100 Mbit/s"]


def test_options_replace_figures_of_a_preset() -> None:
    cluster = requested(hosts=2, network="wifi", latency="0ms", uplink="20mbit")
    assert cluster is not None
    host = cluster.hosts[0]
    assert (host.uplink_bps, host.downlink_bps, host.latency_s) == (20e6, PRESETS["wifi"].downlink_bps, 0.0)
    assert not any(host.impaired for host in cluster.hosts)
    for name, preset in PRESETS.items():
        cluster = requested(hosts=2, network=name)
        assert cluster is not None
        assert cluster.hosts[0].uplink_bps == preset.uplink_bps
    assert requested() is None  # no link, no virtual hosts


def test_a_file_describes_uneven_hosts(tmp_path: Path) -> None:
    cluster = cluster_from_toml(write(tmp_path, EDGE))
    assert [host.name for host in cluster.hosts] == ["rack0", "rack1", "rack2", "edge"]
    assert cluster.hosts[1] == HostLink(name="rack1", uplink_bps=100e6, downlink_bps=100e6)
    assert cluster.hosts[3] == HostLink(
        name="edge", uplink_bps=20e6, downlink_bps=50e6, latency_s=0.005, jitter_s=0.001, loss=0.01, cpu_share=0.5
    )
    assert tuple(cluster.columns().values())[:-1] == (20e6, 50e6, None, 0.005, 0.001, 0.01, 0.5)
    assert (cluster.ranks_per_host, cluster.is_uniform) == (2, False)
    assert [host.impaired for host in cluster.hosts] == [False, False, False, True]
    assert cluster.describe()[3] == (
        "edge: up 20 Mbit/s, down 50 Mbit/s, latency 5 ms +- 1 ms, loss 0.01, runs 50% of the time"
    )
    assert cluster.columns()["cluster_digest"] == "476c044920"  # traces, which came later, have not changed it
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_unnamed_hosts_are_numbered_by_place(tmp_path: Path) -> None:
    cluster = cluster_from_toml(write(tmp_path, '[[host]]\ncount = 2\n[[host]]\nnetwork = "1gbe"\n'))
    assert [host.name for host in cluster.hosts] == ["host0", "host1", "host2"]
    assert [host.uplink_bps for host in cluster.hosts] == [None, None, 1e9]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hosts": 1}, "give 2 to 254"),
        ({"hosts": 2, "ranks_per_host": 0}, "give 1 or more"),
        ({"bandwidth": "100mbit"}, "--hosts N"),
        (
            {"hosts": 2, "bandwidth": "1mbit", "uplink": "1mbit"},
            "--bandwidth and --uplink both set the uplink; give one",
        ),
        (
            {"hosts": 2, "downlink": "1mbit", "bandwidth_trace": "x"},
            "--bandwidth-trace and --downlink both set the down",
        ),
        ({"hosts": 2, "uplink_trace": "no such file"}, "the trace no such file cannot be read"),
        ({"uplink_trace": "no such file"}, "--uplink-trace limits the link of virtual hosts"),
        ({"hosts": 2, "bandwidth": "fast"}, "is not a bandwidth"),
        ({"hosts": 2, "bandwidth": "1kbit"}, "give 100kbit to 100gbit"),
        ({"hosts": 2, "network": "wify"}, "did you mean 'wifi'"),
        ({"hosts": 2, "jitter": "1ms"}, "needs a latency at least as large"),
        ({"hosts": 2, "loss": "100%"}, "loss of 1 is not possible"),
        ({"hosts": 2, "loss": "much"}, "is not a probability of loss"),
        ({"hosts": 2, "loss": "much%"}, "is not a probability of loss"),
        ({"hosts": 2, "latency": "20s"}, "give 0 to 10 s"),
        ({"cluster_file": "edge.toml", "latency": "1ms"}, "put all settings into the file"),
        ({"cluster_file": "no such file.toml"}, "cannot be read"),
    ],
)
def test_impossible_options_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        requested(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hosts = 4", "there is no 'hosts' \\(did you mean 'host'\\?\\)"),
        ('[[host]]\nup_link = "1mbit"', "host 1: there is no 'up_link' \\(did you mean 'uplink'\\?\\)"),
        ('[host]\nname = "a"', r"under the heading \[\[host\]\]"),
        ("[[host]]\nbandwidth = 100", 'write it like bandwidth = "20mbit"'),
        ("[[host]]\ncount = 0", "count=0 is not possible"),
        ("ranks_per_host = 1.5\n[[host]]\ncount = 2", "ranks_per_host=1.5 is not possible"),
        ("[[host]]\ncpu_share = 2\ncount = 2", "cpu_share of 2 is not possible"),
        (f"[[host]]\ncpu_share = 1{'0' * 400}\ncount = 2", "cpu_share of inf is not possible"),
        (f"[[host]]\nloss = 1{'0' * 400}\ncount = 2", "loss of inf"),
        ('[[host]]\ncpu_share = "half"', "is not a number"),
        ('[[host]]\nname = "a b"', "is not a host's name"),
        ("[[host]]\nname = 3", "is not a name"),
        ('[[host]]\nname = "a"\n[[host]]\nname = "a"', "two virtual hosts are named 'a'"),
        ("[[host]]\nloss = true\ncount = 2", "is not a probability of loss"),
        (
            '[[host]]\nuplink_trace = "a"\nuplink = "1mbit"',
            "host 1: uplink and .*host 1: uplink_trace both set the uplink",
        ),
        ("[[host]]\nbandwidth_trace = 1", 'write it like bandwidth_trace = "cell.trace"'),
        ("[[host", "is not TOML"),
        ("", "give 2 to 254"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        cluster_from_toml(write(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rates", "loss", "headers"),
    [
        ((300e6, 300e6), 0.0, "exact"),
        ((300e6, 301e6), 0.0, "estimated"),
        ((100e6, None), 0.0, "estimated"),
        ((1e9, 1e9), 0.01, "exact"),
    ],
)
def test_frames_are_real_where_processors_can_bear_it(
    rates: tuple[float, float | None], loss: float, headers: str
) -> None:
    slow = HostLink(name="slow", uplink_bps=1e6, downlink_bps=1e6)
    other = HostLink(name="other", uplink_bps=rates[0], downlink_bps=rates[1], loss=loss)
    assert Cluster(hosts=(slow, other)).wire_headers == headers


def test_traces_stand_in_the_place_of_rates(tmp_path: Path) -> None:
    (tmp_path / "cell.up").write_text("1\n2\n", encoding="ascii")  # two opportunities in 2 ms: 12.1 Mbit/s
    (tmp_path / "cell.down").write_text("1\n1\n2\n2\n", encoding="ascii")
    path = write(
        tmp_path, '[[host]]\ncount = 2\nnetwork = "4g"\nuplink_trace = "cell.up"\ndownlink_trace = "cell.down"'
    )
    cluster = cluster_from_toml(path)
    host = cluster.hosts[0]
    assert (host.uplink_bps, host.downlink_bps, host.latency_s) == (None, None, 0.025)
    assert host.mean_rates == (2 * 1514 * 8 / 2e-3, 4 * 1514 * 8 / 2e-3)
    assert host.describe().startswith("up 12.1 Mbit/s by cell.up (")
    columns = cluster.columns()
    assert (columns["uplink_bps"], columns["cluster_digest"]) == (host.mean_rates[0], None)
    assert columns["link_trace"] == ", ".join(trace.label for trace in host.traces if trace)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_a_trace_too_slow_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slow").write_text("1000\n", encoding="ascii")
    with pytest.raises(UsageError, match=r"uplink by slow \(.*\), 12.1 kbit/s on average, is not possible"):
        requested(hosts=2, bandwidth_trace=str(tmp_path / "slow"))


def test_a_trace_is_its_opportunities(tmp_path: Path) -> None:
    trace = Trace.of(write(tmp_path, "0\n5\n5\n\t10 \n"))
    assert list(trace.opportunities()) == [0, 5, 5, 10]
    assert trace.mean_bps == pytest.approx(4 * 1514 * 8 / 10e-3)
    assert trace.label == f"edge.toml ({trace.digest})"


def test_the_digest_is_that_of_what_it_says(tmp_path: Path) -> None:
    digests = [Trace.of(write(tmp_path, text)).digest for text in ("1\n2\n", "1\r\n2", "\ufeff1\n2\n", "1\n3\n")]
    assert digests[0] == digests[1] == digests[2] != digests[3]


def test_a_trace_that_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "1\n")
    trace = Trace.of(path)
    path.write_text("2\n", encoding="utf-8")
    with pytest.raises(UsageError, match="has changed since the run was configured"):
        trace.opportunities()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "needs a line with a millisecond above 0"),
        ("0\n0\n", "needs a line with a millisecond above 0"),
        ("1\nfast\n", "line 2: 'fast' is not a delivery opportunity"),
        ("2\n1\n", "line 2: '1' is not a delivery opportunity; .* none smaller than the number before"),
        ("1.5\n", "line 1: '1.5' is not"),
        ("-1\n", "line 1: '-1' is not"),
        ("1\n\n2\n", "line 2: '' is not"),
        ("9" * 5000, "line 1: '99999999999999999999' is not"),
        ("1073741825\n", "is not a delivery opportunity"),
        ("²\n", "it holds more than numbers"),
        ("é\n", "it holds more than numbers"),
    ],
)
def test_what_is_no_trace_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        Trace.of(write(tmp_path, text))
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError):
        Trace.of(tmp_path)
