"""The choice of the link's backend: the kernel if possible, the forwarder if necessary, else an error message."""

from __future__ import annotations

import pytest

from bench.core.errors import UsageError
from bench.hosts import support
from bench.hosts.cluster import Cluster, HostLink, Trace

LATE = {"latency_s": 0.01}
SHAKY = {"latency_s": 0.01, "jitter_s": 0.001}
LOSSY = {"loss": 0.01}
TRACED = {"uplink_trace": Trace(path="/cell", digest="0" * 10, mean_bps=1e7)}


def machine(monkeypatch: pytest.MonkeyPatch, *, netem: bool, forwarder: bool) -> None:
    monkeypatch.setattr(support, "netem_supported", lambda: (netem, "" if netem else "no netem"))
    monkeypatch.setattr(support, "forwarder_supported", lambda: (forwarder, "" if forwarder else "no tun"))


def cluster(link: dict[str, object]) -> Cluster:
    return Cluster.uniform(2, link=HostLink(name="any", **link))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("link", "netem", "forwarded"),
    [
        ({}, False, False),
        ({"uplink_bps": 1e9}, False, False),
        (LATE, True, False),
        (LATE, False, True),
        (LOSSY, True, False),
        (LOSSY, False, True),
        (SHAKY, True, True),
        (TRACED, True, True),
    ],
    ids=str,
)
def test_the_kernel_where_it_can(
    link: dict[str, object], netem: bool, forwarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, netem=netem, forwarder=True)
    settled = support.choose_backend(cluster(link))
    assert settled.forwarded is forwarded
    assert settled.hosts == cluster(link).hosts
    assert settled.wire_headers == ("exact" if forwarded or link == LOSSY else "estimated")


@pytest.mark.parametrize(
    ("link", "netem", "sentence"),
    [
        (LATE, False, "latency cannot be set here: no tun; and no netem; or leave them out"),
        (LOSSY, False, "loss cannot be set here: no tun; and no netem"),
        (SHAKY, True, "latency and jitter cannot be set here: no tun; or leave"),
        (TRACED, True, "traces cannot be set here: no tun; or leave"),
    ],
    ids=str,
)
def test_neither_is_one_sentence(
    link: dict[str, object], netem: bool, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, netem=netem, forwarder=False)
    with pytest.raises(UsageError, match=sentence):
        support.choose_backend(cluster(link))


def test_the_forwarder_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, netem=True, forwarder=True)
    assert support.choose_backend(Cluster(hosts=cluster({}).hosts, forwarded=True)).forwarded


def test_what_hosts_do_not_find_each_other_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, netem=True, forwarder=True)
    assert support.choose_backend(cluster({"latency_s": 1.0, "jitter_s": 0.4}))
    with pytest.raises(
        UsageError, match=r"with a latency of 1\.5 s, including jitter, virtual hosts do not find each other"
    ):
        support.choose_backend(cluster({"latency_s": 1.0, "jitter_s": 0.5}))
