"""The simulation of flows: known times, the bytes of the waves, and faster parts never delay the end."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.core.errors import UsageError
from bench.extensions.predict.calibration import LinearCost
from bench.extensions.predict.flows import Flows
from bench.extensions.predict.links import Floats, Links
from collectives import options
from collectives.base import Collective
from collectives.schedule.rounds import Layout
from collectives.schedule.waves import Ints, Lengths, Wave, waves_of

NAMES = (
    "ring",
    "halving_doubling",
    "tree",
    "direct:segment_bytes=3000",
    "allgather",
    "server",
    "server:placement=sharded",
    "hierarchical",
)
FIGURES = ("up_rate", "down_rate", "latency_s")
COSTS = {"message_s": 1e-3, "per_byte_s": 1e-6, "wake_s": 1e-4, "ack_share": 0.02, "carry_byte_s": 1e-7}


def dense(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
    return np.ones_like(start), 16 + 4 * (stop - start)


def one_rank_per_host(up_rate: Floats, down_rate: Floats, latency_s: Floats, **more: Any) -> Links:
    hosts = np.arange(len(up_rate))
    return Links(host_of=hosts, up_rate=up_rate, down_rate=down_rate, latency_s=latency_s, **more)


def links(n: int, rate: float = 1e6, latency_s: float = 0.0, **more: float) -> Links:
    return one_rank_per_host(np.full(n, rate), np.full(n, rate), np.full(n, latency_s), **more)


def flows_of(name: str, joined: Links, numel: int = 6000) -> Flows:
    flows = Flows(joined)
    collective = options.build("collectives", Collective, name)
    waves = waves_of(collective, joined.num_ranks, Layout.dense(numel, key=(0,)), Lengths(dense))
    assert waves is not None
    flows.run(waves)
    return flows


def seconds(name: str, joined: Links, numel: int = 6000) -> float:
    return float(flows_of(name, joined, numel).ready.max())


def test_a_ring_of_equals_sends_twice_its_share() -> None:
    assert seconds("ring", links(6)) == pytest.approx(2 * 5 / 6 * 24_000 / 1e6)


def test_latency_counts_once_per_step() -> None:
    """No sender waits for the receiver to announce free space."""
    slower = seconds("ring", links(6, latency_s=0.1))
    assert slower == pytest.approx(seconds("ring", links(6)) + 10 * 0.1)


def test_a_server_receives_from_all_over_one_link_and_answers_over_it() -> None:
    assert seconds("server", links(5)) == pytest.approx(2 * 4 * 24_016 / 1e6)


def test_a_slow_uplink_holds_up_a_ring_and_an_allgather() -> None:
    uneven = links(4)
    uneven.up_rate[2] = 1e5
    assert seconds("ring", uneven) == pytest.approx(2 * 3 / 4 * 24_000 / 1e5, rel=0.05)
    assert seconds("allgather", uneven) == pytest.approx(3 * 24_016 / 1e5)


def test_a_slow_link_without_a_share_carries_the_payload_once() -> None:
    """Eight segments on the way to the owners, while seven come back; then the last comes back."""
    uneven = links(4)
    uneven.up_rate[2] = uneven.down_rate[2] = 1e5
    shared = seconds("direct:shares=bandwidth,rates=5+5+1+5,segment_bytes=3000", uneven)
    assert shared == pytest.approx(9 / 8 * 24_000 / 1e5, rel=0.02)
    assert seconds("ring", uneven) == pytest.approx(2 * 3 / 4 * 24_000 / 1e5, rel=0.05)


def test_late_messages_queue_behind_those_that_came_before_them() -> None:
    """Three messages of 1 s each to one rank, sent at 0, 0 and 10 s: the last finds the link free."""
    flows = Flows(links(4))
    flows.ready = np.array([0.0, 0.0, 0.0, 10.0])
    flows.run([Wave(np.array([1, 2, 3]), np.array([0, 0, 0]), np.full(3, 1_000_000))])
    assert flows.ready.tolist() == [11.0, 0.0, 0.0, 10.0]


def test_messages_within_a_host_take_no_link() -> None:
    assert seconds("ring", dataclasses.replace(links(1), host_of=np.zeros(4, dtype=int))) == 0.0


def test_ranks_of_a_host_share_its_link() -> None:
    """Two hosts of two ranks: the leaders exchange halves twice, and nothing else leaves a host."""
    paired = dataclasses.replace(links(2), host_of=np.array([0, 0, 1, 1]))
    assert seconds("hierarchical", paired) == pytest.approx(2 * 12_000 / 1e6)
    assert seconds("allgather", paired) == pytest.approx(2 * 2 * 24_016 / 1e6)


def test_a_rank_works_for_every_message_and_byte() -> None:
    flows = flows_of("ring", links(4, rate=np.inf, message_s=1.0, per_byte_s=1e-3))
    assert flows.busy_s == pytest.approx(np.full(4, 2 * 6 * (1.0 + 6.0)))


def test_only_what_is_added_costs_adding() -> None:
    """A ring adds in its first half; messages of the second half replace values."""
    joined = links(4, rate=np.inf)
    flows = Flows(joined)
    ring = waves_of(options.build("collectives", Collective, "ring"), 4, Layout.dense(6000, key=(0,)), Lengths(dense))
    flows.run(ring or (), merge=LinearCost(fixed_s=1.0, per_byte_s=1e-3))
    assert flows.busy_s == pytest.approx(np.full(4, 3 * (1.0 + 6.0)))


def test_what_comes_is_acknowledged_over_the_link_by_which_a_rank_sends() -> None:
    """A ring's links send and receive equally much; a server's link also carries acknowledgements to the workers."""
    assert seconds("ring", links(6, ack_share=0.02)) == pytest.approx(1.02 * seconds("ring", links(6)))
    answered = 4 * 24_016 / 1e6
    assert seconds("server", links(5, ack_share=0.02)) == pytest.approx(2 * answered)
    flows = Flows(links(2, ack_share=0.5))
    both_ways = Wave(np.array([0, 1]), np.array([1, 0]), np.array([1_000_000, 3_000_000]))
    flows.run([both_ways])
    assert flows.ready.tolist() == [3.5, 2.5]  # 3 s and the acknowledgement of 1 s; 1 s and the acknowledgement of 3 s


def test_a_rank_that_waited_is_woken_for_every_step() -> None:
    assert seconds("ring", links(4, wake_s=0.1)) == pytest.approx(seconds("ring", links(4)) + 6 * 0.1)


def test_cores_that_carry_all_links_are_one_more_link_that_all_share() -> None:
    """A ring of four sends 4 x 6 messages of 6 kB in all."""
    carried_s = 4 * 6 * 6000 * 1e-5
    assert seconds("ring", links(4, rate=np.inf, carry_byte_s=1e-5)) == pytest.approx(carried_s)
    assert seconds("ring", links(4, carry_byte_s=1e-9)) == pytest.approx(seconds("ring", links(4)))


def test_what_stays_on_a_host_is_sent_and_takes_no_link() -> None:
    """Ranks 3 and 7 of a ring of eight send to the other host."""
    shared = dataclasses.replace(links(2), host_of=np.repeat([0, 1], 4))
    flows = flows_of("ring", shared, 8000)
    assert flows.sent.tolist() == [2 * 7 * 4000] * 8
    assert flows.sent_over_links.tolist() == [0, 0, 0, 2 * 7 * 4000] * 2
    apart = flows_of("allgather", links(4))
    assert apart.sent_over_links.tolist() == apart.sent.tolist()


def test_more_messages_than_memory_holds_are_refused() -> None:
    ranks = np.arange(100_000)
    with pytest.raises(UsageError, match="100000 ranks that send to 100000 each"):
        Flows(links(len(ranks))).run([Wave(ranks, ranks, np.asarray(8), each_to_each=True)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [2, 7])
def test_waves_in_one_go_are_the_same_messages_one_by_one(name: str, n: int) -> None:
    rng = np.random.default_rng(n)
    joined = one_rank_per_host(*rng.uniform(1e5, 1e6, (2, n)), np.full(n, 0.01), **COSTS)
    collective = options.build("collectives", Collective, name)
    waves = list(waves_of(collective, n, Layout.dense(6000, key=(0,)), Lengths(dense)) or [])
    at_once, one_by_one = Flows(joined), Flows(joined)
    at_once.run(waves)
    one_by_one.run([Wave(*wave.messages()) for wave in waves])
    for figure in ("ready", "busy_s", "sent", "messages"):
        assert getattr(at_once, figure) == pytest.approx(getattr(one_by_one, figure)), figure


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    n=st.integers(2, 9),
    seed=st.integers(0, 2**32 - 1),
    figure=st.sampled_from((*FIGURES, "numel", *COSTS)),
    factor=st.floats(1.0, 20.0),
)
def test_nothing_faster_ends_later(name: str, n: int, seed: int, figure: str, factor: float) -> None:
    rng = np.random.default_rng(seed)
    worse = one_rank_per_host(
        *rng.lognormal(13, 1.0, (2, n)),
        rng.exponential(0.01, n),
        **COSTS | {"message_s": rng.exponential(1e-4), "carry_byte_s": rng.exponential(1e-7)},
    )
    numel = int(rng.integers(1, 20_000))
    slow = seconds(name, worse, numel)
    if figure == "numel":
        numel = max(1, round(numel / factor))
        better = worse
    elif figure in FIGURES:
        changed = getattr(worse, figure).copy()
        changed[rng.integers(n)] *= factor if figure != "latency_s" else 1 / factor
        better = dataclasses.replace(worse, **{figure: changed})
    else:
        better = dataclasses.replace(worse, **{figure: getattr(worse, figure) / factor})
    assert seconds(name, better, numel) <= slow * (1 + 1e-9)
