"""Predicted steps: hand-computed times, causes of slower steps, and notes on what was not measured."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.core.errors import UsageError
from bench.extensions.predict import calibrating
from bench.extensions.predict.calibration import (
    FRAMES,
    LOCAL,
    SEGMENTS,
    Calibration,
    CpuContention,
    EncodedBucket,
    LeafSize,
    LinearCost,
    MessageCosts,
    MessageProfile,
    Validated,
)
from bench.extensions.predict.contention import crowd_at
from bench.extensions.predict.message_profile import growth_in_parts
from bench.extensions.predict.options import CalibrateConfig, PredictConfig
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.ranking import dense_on_each_collective, pairs, parse_sweep, regimes, sweep
from bench.extensions.predict.request import (
    ACK_SHARE,
    FRAME_PER_PAYLOAD,
    check,
    check_request,
    predicted,
    request_from_options,
)
from bench.extensions.predict.sentences import where_it_pays
from bench.extensions.predict.sums import lengths_of
from bench.extensions.predict.validation import notes
from bench.hosts.cluster import HostLink
from tests.extensions.predict.calibrations import SPARSE, calibration
from tests.testing.payloads import make

MEGABIT = 1e6 / 8 / FRAME_PER_PAYLOAD / (1 + ACK_SHARE)
"""Payload bytes per second of a link that carries as much in the other direction."""


def step(known: Calibration | None = None, **asked: Any) -> Prediction:
    known = known or calibration()
    return predicted(known, check(PredictConfig(**asked), known))


def test_without_limits_a_step_takes_what_a_rank_takes() -> None:
    prediction = step(collective="ring")
    assert prediction.step_time_s == pytest.approx(0.4)
    assert prediction.exposed_s == pytest.approx(0.0)
    assert prediction.bound_by == "compute"
    assert prediction.samples_per_s == pytest.approx(2 * 32 / 0.4)


def test_a_slow_link_is_waited_for_from_the_first_bucket_on() -> None:
    """A ring of two sends each bucket's 500 kB once; the first is ready 0.25 s after the step began."""
    prediction = step(collective="ring", bandwidth="10mbit")
    assert prediction.step_time_s == pytest.approx(0.25 + 2 * 500_000 / (10 * MEGABIT) + 0.05, rel=1e-4)
    assert prediction.exposed_s == pytest.approx(prediction.step_time_s - 0.35 - 0.05)
    assert prediction.payload_bytes_per_step == 1_000_000
    assert prediction.compression_ratio == 1
    assert prediction.bound_by == "network"


def test_the_sync_trigger_sends_nothing_before_the_last_bucket() -> None:
    waits = step(collective="ring", bandwidth="10mbit", trigger="sync").step_time_s
    assert waits == pytest.approx(step(collective="ring", bandwidth="10mbit").step_time_s + 0.1, abs=1e-5)


def test_encoding_and_decoding_are_part_of_a_step() -> None:
    """Only the second of two buckets is encoded after backward; both are decoded, the first while the second waits."""
    assert step(compressor="topk").step_time_s == pytest.approx(0.35 + 0.03 + 2 * 0.01 + 0.05)


def handled(**figures: Any) -> Calibration:
    """Return a calibration whose message profiles have these additional figures."""
    known = calibration()

    def more(bucket: EncodedBucket) -> EncodedBucket:
        return dataclasses.replace(
            bucket, offers=tuple(dataclasses.replace(offer, **figures) for offer in bucket.offers)
        )

    return dataclasses.replace(known, encoded={name: tuple(map(more, made)) for name, made in known.encoded.items()})


@pytest.mark.parametrize(
    ("collective", "figures", "of_ranks"),
    [
        ("allgather", {"pack_s": 0.001}, 4),
        ("allgather", {"unpack": LinearCost(fixed_s=0.001)}, 4 * 3),
        ("allgather", {"decode_s": 0.001}, 4 * 3),
        ("ring", {"merge": LinearCost(fixed_s=0.001)}, 4 * 3),
        ("ring", {"unpack": LinearCost(per_byte_s=0.001 / 5_016)}, 4 * 2 * 3 / 4),
        ("server", {"pack_s": 0.001}, 4),
        ("server", {"decode_s": 0.001}, 3),
        ("server", {"unpack": LinearCost(fixed_s=0.001)}, 3 + 3),
    ],
)
def test_what_is_done_to_payloads_takes_cpu_time(collective: str, figures: dict[str, Any], of_ranks: float) -> None:
    """Two buckets; the expected values are the milliseconds of all four ranks for one bucket."""
    asked: dict[str, Any] = {"compressor": "topk", "collective": collective, "hosts": 4}
    more_s = step(handled(**figures), **asked).cpu_s_per_step - step(**asked).cpu_s_per_step
    assert more_s == pytest.approx(2 * of_ranks * 0.001 / 4, rel=2e-2)


def test_wire_tensors_are_neither_packed_nor_read() -> None:
    known = handled(pack_s=0.001, unpack=LinearCost(fixed_s=0.001))
    assert step(known, collective="ring").cpu_s_per_step == step(collective="ring").cpu_s_per_step
    assert step(known, collective="allgather").cpu_s_per_step > step(collective="allgather").cpu_s_per_step


def test_a_message_among_steps_costs_more_than_one_of_many_in_a_row() -> None:
    asked: dict[str, Any] = {"collective": "ring", "hosts": 2}
    more_s = step(calibration(around_message_s=0.001), **asked).cpu_s_per_step - step(**asked).cpu_s_per_step
    assert more_s == pytest.approx((2 * 2 + 1) * 2 * 0.001)  # two messages per bucket, one at the end


def test_what_is_exchanged_early_holds_compute_up_where_all_cores_compute() -> None:
    """Encoding the first of two buckets takes 0.03 s of each of four ranks, on two cores."""
    asked: dict[str, Any] = {"compressor": "topk", "hosts": 4, "latency": "1s"}
    shared = step(calibration(cores=2), shared_cores=2, **asked)
    assert shared.step_time_s - shared.exposed_s == pytest.approx(2 * (0.35 + 0.05) + 4 * 0.03 / 2)
    plenty = step(calibration(cores=8), shared_cores=8, **asked)
    assert plenty.step_time_s - plenty.exposed_s == pytest.approx(0.35 + 0.05)


def test_who_waits_for_a_message_waits_for_its_turn_as_long_as_cores_compute() -> None:
    """A ring of four takes six rounds for each bucket; those of the first begin 0.2 s before computing ends."""
    asked: dict[str, Any] = {"compressor": "topk", "collective": "ring", "hosts": 4, "shared_cores": 2}
    asked |= {"latency": "40ms"}
    at_once, in_turn = (
        step(calibration(cores=2, crowded_wake_s=seconds), **asked).step_time_s for seconds in (0.0, 0.01)
    )
    assert in_turn - at_once == pytest.approx(2 * 0.01, abs=1e-4)  # the third round comes after all have ended
    plenty = calibration(cores=4, crowded_wake_s=0.01)
    assert step(plenty, **asked | {"shared_cores": 4}) == step(calibration(cores=4), **asked | {"shared_cores": 4})


def test_what_is_summed_early_is_decoded_while_the_next_bucket_waits() -> None:
    """0.01 s to encode and 0.01 s to decode each: only those of the second bucket come after backward."""
    assert step(compressor="bf16", collective="ring").step_time_s == pytest.approx(0.35 + 0.01 + 0.01 + 0.05)
    both_at_once = step(compressor="bf16", collective="ring", trigger="sync").step_time_s
    assert both_at_once == pytest.approx(0.35 + 2 * (0.01 + 0.01) + 0.05)


def test_latency_is_paid_by_every_step_of_a_collective() -> None:
    """The final agreement that all values are finite also takes a latency."""
    slower = step(collective="ring", latency="10ms").step_time_s - step(collective="ring").step_time_s
    assert slower == pytest.approx((2 + 1) * 0.010, abs=1e-4)


def test_that_all_was_finite_is_told_right_behind_an_all_gathers_messages() -> None:
    """This agreement then costs no extra latency, unlike after a last message that depends on others."""
    asked: dict[str, Any] = {"collective": "allgather", "hosts": 4}
    slower = step(latency="10ms", **asked).step_time_s - step(**asked).step_time_s
    assert slower == pytest.approx(0.010, abs=1e-4)


def test_while_payloads_are_decoded_ranks_are_told_that_all_was_finite() -> None:
    """A ring of two takes two latencies; the second bucket's decoding, 0.01 s, is as long as the third latency."""
    asked: dict[str, Any] = {"compressor": "bf16", "collective": "ring", "latency": "10ms"}
    told_s = step(**asked).step_time_s - (0.35 + 0.01 + 2 * 0.010 + 0.01 + 0.05)
    assert told_s == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize(("ready_s", "waits_s"), [(0.25, 0.0), (0.6, 0.175), (0.75, 0.2)])
def test_a_connection_that_was_silent_while_ranks_computed_begins_with_less(ready_s: float, waits_s: float) -> None:
    """Only the first of two buckets waits, another round trip after two timeouts, and 0.15 s belong to the silence."""
    known = calibration(batch_s=ready_s - 0.2, forward_s=0.1)
    expected_s = ready_s + 2 * 0.1 + waits_s + 2 * 0.1 + 0.1 + 0.05
    assert step(known, collective="ring", latency="100ms").step_time_s == pytest.approx(expected_s, abs=1e-3)


def test_a_trees_connections_are_silent_while_others_sum_and_begin_with_less_again() -> None:
    """Each of two buckets of 0.5 MB takes three messages up and three down.

    Of each message 14 480 bytes leave at once, and the rest after five round trips if the others' latencies are longer
    than a timeout.
    """
    known = calibration(batch_s=0.0, forward_s=0.0, update_s=0.0)

    def latencies(latency_s: float) -> float:
        of_step = {"collective": "tree", "hosts": 8}
        slower_s = step(known, latency=f"{latency_s}s", **of_step).step_time_s - step(known, **of_step).step_time_s
        return slower_s / latency_s

    assert latencies(0.01) == pytest.approx(6, rel=0.01)  # of the last bucket
    assert latencies(0.1) == pytest.approx(2 * 6 * (1 + 5 * 2), rel=0.02)


def test_ranks_that_share_cores_compute_more_slowly_and_never_faster_than_the_cores_allow() -> None:
    known = calibration(cores=2)
    crowded = step(known, collective="ring", hosts=8, shared_cores=2)
    assert crowded.step_time_s == pytest.approx(4 * 0.4)
    assert step(known, collective="ring", hosts=8).step_time_s == pytest.approx(0.4)
    assert step(known, collective="ring", hosts=2, ranks_per_host=4).step_time_s == pytest.approx(2 * 0.4)


def test_between_measured_loads_times_are_interpolated_and_beyond_them_threads_take_turns() -> None:
    crowds = tuple(
        CpuContention(load=load, handed_over_s=(at, at + 0.05), computed_s=at + 0.05, cpu_s=cpu_s)
        for load, at, cpu_s in ((0.5, 99.0, 0.4), (1.0, 0.4, 0.5), (2.0, 0.9, 0.6))
    )
    known = calibration(cores=2, crowds=crowds)
    assert crowd_at(known, 0.25).handed_over_s == pytest.approx((0.25, 0.35))  # CPU time of a rank alone
    assert crowd_at(known, 0.75).computed_s == pytest.approx((0.35 + 0.45) / 2)
    assert crowd_at(known, 1.5).handed_over_s == pytest.approx((0.65, 0.70))
    assert crowd_at(known, 6.0).computed_s == pytest.approx(3 * 0.95)
    assert [crowd_at(known, load).cpu_s for load in (0.1, 1.5, 6.0)] == pytest.approx([0.4, 0.55, 0.6])
    few = calibration(cores=64, crowds=crowds[:1])
    assert crowd_at(few, 1.0).computed_s == pytest.approx(0.35)
    assert crowd_at(few, 2.0).computed_s == pytest.approx(2 * 0.35)


def test_what_carries_messages_between_virtual_hosts_takes_the_cores_that_ranks_share() -> None:
    """Two ranks send 500 kB twice each; a byte keeps the machine's two cores busy for 4 us."""
    carried = MessageCosts(carry_byte_s=4e-6)
    known = calibration(cores=2, messages={LOCAL: MessageCosts(), SEGMENTS: carried, FRAMES: carried})
    prediction = step(known, collective="ring", hosts=2, shared_cores=2)
    assert prediction.step_time_s == pytest.approx((2 * 0.4 + 4 * 500_000 * 4e-6) / 2, rel=1e-3)
    assert prediction.bound_by == "cpu"
    assert prediction.cpu_s_per_step == pytest.approx(0.4)
    assert step(known, collective="ring", hosts=2).step_time_s == pytest.approx(0.4)
    together = step(known, collective="ring", hosts=2, ranks_per_host=2, shared_cores=2)
    of_links_s = 2 * (2 * 3 / 4 * 1_000_000) * 4e-6  # the bytes that two of the four ranks send
    assert together.step_time_s == pytest.approx((4 * together.cpu_s_per_step + of_links_s) / 2, rel=1e-3)


def test_only_real_frames_are_headed_and_acknowledged() -> None:
    known = calibration(cores=8)
    slow, fast = (
        step(known, collective="ring", hosts=2, shared_cores=8, bandwidth=rate).step_time_s - 0.3
        for rate in ("10mbit", "1gbit")
    )
    assert slow == pytest.approx(1_000_000 / (10 * MEGABIT), rel=1e-3)
    assert fast == pytest.approx(0.1 + 500_000 * 8 / 1e9, rel=1e-3)


def test_a_host_that_runs_half_of_the_time_takes_twice_as_long(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("[[host]]\ncount = 2\n[[host]]\ncpu_share = 0.5\n")
    assert step(collective="ring", cluster_file=str(cluster)).step_time_s == pytest.approx(0.8)


def test_unions_grow_as_they_were_measured_and_are_never_longer_than_dense() -> None:
    offer = MessageProfile(
        leaves=(LeafSize(numel=1000, nbytes=416),), layers=(0,), growth=((1, 1.0), (2, 1.9), (4, 3.4))
    )
    start = np.zeros(5, dtype=np.int64)
    lengths = lengths_of(offer).alone(start, start + 1000, np.array([1, 2, 4, 8, 1000]))
    assert lengths.tolist() == [416, 16 + 760, 16 + 1360, 16 + math.ceil(400 * 3.4**2 / 1.9), 4016]


def test_parts_of_codes_are_longer_than_the_whole() -> None:
    codes, floats = (make(kind, 10_000, torch.float16).payload for kind in ("sparse_codes", "group_sparse"))
    assert growth_in_parts(floats) == pytest.approx(1.0, abs=0.02)
    assert growth_in_parts(codes) > 1.5
    offer = MessageProfile(leaves=(LeafSize(numel=1000, nbytes=416),), layers=(0,), growth=((1, 2.0), (2, 3.0)))
    start, stop = np.array([0, 0, 500]), np.array([1000, 500, 1000])
    assert lengths_of(offer).alone(start, stop, np.ones(3, dtype=np.int64)).tolist() == [416, 416, 416]
    two = dataclasses.replace(offer, leaves=2 * offer.leaves, layers=(0, 1))
    _, nbytes = lengths_of(two).packed(2 * start, 2 * stop, np.ones(3, dtype=np.int64))
    assert nbytes.tolist() == [832, 416, 416]  # payloads that are not cut


def test_pieces_of_a_message_are_as_long_together_as_the_message() -> None:
    offer = MessageProfile(leaves=(LeafSize(numel=300, nbytes=116), LeafSize(numel=700, nbytes=516)), layers=(0, 1))
    start = np.array([0, 300, 0])
    stop = np.array([300, 1000, 1000])
    payloads, nbytes = lengths_of(offer).packed(start, stop, np.ones(3, dtype=np.int64))
    assert payloads.tolist() == [1, 1, 2]
    assert nbytes.tolist() == [116, 516, 120 + 520]  # both are padded in one message


@settings(max_examples=40, deadline=None)
@given(
    compressor=st.sampled_from(["none", "bf16", "topk"]),
    collective=st.sampled_from(["ring", "tree", "server", "allgather"]),
    hosts=st.integers(2, 6),
    rate=st.floats(1, 1000),
    latency=st.floats(0, 50),
    faster=st.floats(1, 10),
)
def test_faster_links_make_no_step_longer(
    compressor: str, collective: str, hosts: int, rate: float, latency: float, faster: float
) -> None:
    def at(rate: float, latency: float) -> float:
        links = {"bandwidth": f"{rate:.6f}mbit", "latency": f"{latency:.6f}ms"}
        return step(compressor=compressor, collective=collective, hosts=hosts, **links).step_time_s

    slow = at(rate, latency)
    assert at(rate * faster, latency) <= slow * (1 + 1e-9)
    assert at(rate, latency / faster) <= slow * (1 + 1e-9)


def test_a_sweep_finds_where_compression_stops_to_pay() -> None:
    """On a fast network, encoding costs more than it saves."""
    known = calibration()
    curve = sweep(
        known, check(PredictConfig(compressor="topk", hosts=2), known), parse_sweep("bandwidth=1mbit..10gbit")
    )
    (rate,) = curve.break_even_bps
    assert curve.pays[0]
    assert not curve.pays[-1]
    dense, pair = (step(compressor=name, bandwidth=f"{rate / 1e6:.6f}mbit").step_time_s for name in ("bf16", "topk"))
    assert pair == pytest.approx(dense, rel=0.02)


@pytest.mark.parametrize("text", ["bandwidth", "bandwidth=10mbit", "latency=1ms..2ms", "bandwidth=2mbit..1mbit"])
def test_a_sweep_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--sweep"):
        parse_sweep(text)


def test_what_was_not_measured_is_outside_the_validated_range() -> None:
    cell = Validated(
        compressor="topk", collective="allgather", world_size=4, bandwidth_bps=1e8, latency_s=0.0, predicted_s=1.0,
        measured_s=1.0, error=0.0,
    )  # fmt: skip
    known = calibration(validated=(cell, dataclasses.replace(cell, world_size=8, bandwidth_bps=1e9, error=-0.1)))

    def said(**asked: Any) -> list[str]:
        return notes(
            known, check(PredictConfig(**{"compressor": "topk", "hosts": 4, "bandwidth": "200mbit"} | asked), known)
        )

    cores = known.cores
    off_by = "off by 5.0% in the median, by 10.0% at most"
    assert said(shared_cores=cores) == [f"Such step times were checked against 2 real run(s): {off_by}"]
    known_error = (
        f"Such step times were checked against 2 real run(s), whose ranks shared {cores} core(s), unlike these: "
    )
    known_error += off_by
    assert said() == [known_error]
    for other, reason in (
        ({"hosts": 9}, "9 ranks; 4 to 8 were measured"),
        ({"bandwidth": "10mbit"}, "10 Mbit/s; 100 Mbit/s to 1 Gbit/s were measured"),
        ({"latency": "1ms"}, "a one-way delay of 1 ms is longer than any that was measured"),
        ({"compressor": "none"}, "none on native was not measured"),
        ({"bandwidth": None}, "links that are not limited were not measured"),
        ({"hosts": 2, "ranks_per_host": 2}, "2 rank(s) on a host were not measured"),
    ):
        assert said(**other) == [f"Not yet checked against real runs on this machine: {reason}", known_error]
    for other in ({"straggler": "rank=1,slowdown=2"}, {"trigger": "sync"}):
        (sentence,) = said(**other)
        assert sentence.startswith("Not yet checked against real runs on this machine: ddp with")
    local = Validated(**vars(cell) | {"bandwidth_bps": None})
    known = dataclasses.replace(known, validated=(cell, local))
    assert said(bandwidth=None) == said(
        bandwidth="100mbit"
    )  # both were measured, which says nothing about rates in between
    assert "200 Mbit/s; 100 Mbit/s to 100 Mbit/s were measured" in said()[0]
    known = dataclasses.replace(known, validated=(local,))
    assert "200 Mbit/s; only links without a limit were measured" in said()[0]
    assert (
        "Not yet checked against real runs on this machine"
        in notes(calibration(), check(PredictConfig(), calibration()))[0]
    )


def test_what_binds_a_step_is_told() -> None:
    slow = {"topk": tuple(dataclasses.replace(bucket, work_s=(0.3, 0.1)) for bucket in calibration().encoded["topk"])}
    known = calibration(encoded=calibration().encoded | slow)

    def bound_by(**asked: Any) -> str:
        return predicted(known, check(PredictConfig(**asked), known)).bound_by

    assert bound_by() == "compute"
    assert bound_by(bandwidth="10mbit") == "network"
    assert bound_by(compressor="topk") == "exchange"
    assert bound_by(compressor="topk", bandwidth="100kbit") == "network"
    assert bound_by(hosts=8, shared_cores=1) == "cpu"


def test_another_machines_calibration_is_named() -> None:
    known = calibration(cpu="a processor that nobody has")
    assert "a processor that nobody has" in notes(known, check(PredictConfig(), known))[0]


def test_a_calibration_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration().write(path)
    assert Calibration.read(path) == calibration()


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("cores",), 0, "cores: Input should be greater than or equal to 1"),
        (("batch_s",), -1, "batch_s: Input should be greater than or equal to 0"),
        (("batch_s",), math.nan, "batch_s: Input should be"),
        (("messages", "local", "per_byte_s"), math.inf, "messages.local.per_byte_s: Input should be a finite number"),
        (("buckets",), [], "do not match"),
        (("encoded", "none"), [], "do not match"),
        (("crowds",), [], "do not match"),
        (("messages",), {}, "do not match"),
        (("buckets", 0, "numels"), (1, 2), "do not match"),
        (("encoded", "none", 0, "offers", 0, "layers"), (77,), "do not match"),
        (("encoded", "none", 0, "offers", 0, "layers"), (0, 0), "do not match"),
    ],
)
def test_figures_that_nothing_can_have_are_no_calibration(place: tuple[Any, ...], value: Any, sentence: str) -> None:
    values = dataclasses.asdict(calibration())
    *path, name = place
    inner = functools.reduce(operator.getitem, path, values)
    inner[name] = value
    with pytest.raises(UsageError, match=sentence):
        Calibration.of(values)


def test_the_sync_trigger_waits_for_rank_0_to_have_heard_of_all() -> None:
    """A message to rank 0 and back comes before anything is sent, also with a slow rank."""
    asked: dict[str, Any] = {"collective": "ring", "trigger": "sync", "hosts": 4}
    two = asked | {"hosts": 2}
    assert step(latency="10ms", **two).step_time_s - step(**two).step_time_s == pytest.approx(
        (2 + 2 * 2 + 1) * 0.010, abs=1e-4
    )
    slow = {"straggler": "rank=3,slowdown=3"}
    last_s = 0.05 + 3 * 0.3
    assert step(bandwidth="10mbit", **asked | slow).step_time_s == pytest.approx(
        step(bandwidth="10mbit", **asked).step_time_s + last_s - 0.35
    )
    assert step(**asked).payload_bytes_per_step == step(collective="ring", hosts=4).payload_bytes_per_step
    assert step(**asked).messages_per_step == step(collective="ring", hosts=4).messages_per_step


def test_what_a_slow_host_does_for_messages_takes_longer_too(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("[[host]]\n[[host]]\ncpu_share = 0.1\n")
    known = calibration(messages={LOCAL: MessageCosts(message_s=0.01)})
    more = [
        step(costs, collective="allgather", compressor="topk", cluster_file=str(cluster)).step_time_s
        for costs in (known, calibration())
    ]
    alone = [
        step(costs, collective="allgather", compressor="topk", hosts=2).step_time_s for costs in (known, calibration())
    ]
    assert more[0] - more[1] == pytest.approx(10 * (alone[0] - alone[1]), rel=0.2)


def test_the_terms_of_each_of_several_messages_are_added() -> None:
    """Two messages per bucket, from four ranks each: three more terms of each are added if they arrive unsummed."""

    def takes_s(*decode_s: float) -> float:
        offers = [
            [MessageProfile(leaves=(SPARSE,), layers=(number,), decode_s=each) for each in decode_s]
            for number in range(2)
        ]
        buckets = tuple(EncodedBucket(work_s=(0.0, 0.0, 0.0), offers=tuple(of_bucket)) for of_bucket in offers)
        known = calibration(encoded=calibration().encoded | {"powersgd": buckets})
        asked = {"compressor": "powersgd", "collective": "allgather", "hosts": 4, "trigger": "sync"}
        return step(known, **asked).step_time_s

    assert takes_s(0.01, 0.02) - takes_s(0.0, 0.0) == pytest.approx(2 * 3 * (0.01 + 0.02))


@pytest.mark.parametrize(
    ("compressor", "sentence"),
    [
        ("terngrad:shared_scale=true", "makes the ranks communicate before they encode"),
        ("group_topk:preset=patent", "needs the whole model as one bucket"),
        ("auto", "works through DDP's own hook"),
        ("torch_powersgd", "works through DDP's own hook"),
    ],
)
def test_what_cannot_be_calibrated_is_not_asked_for(compressor: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        step(compressor=compressor)
    with pytest.raises(UsageError, match=sentence):
        calibrating.check(CalibrateConfig(compressors=compressor))


def test_ranks_of_a_host_are_one_group_of_a_dense_opponent() -> None:
    ways = dense_on_each_collective(
        calibration(), check(PredictConfig(compressor="topk", hosts=4, ranks_per_host=8), calibration())
    )
    assert "hierarchical:group_size=8" in [way.collective for way in ways]


def test_a_rank_alone_is_not_predicted() -> None:
    known = calibration()
    alone = dataclasses.replace(check(PredictConfig(), known), hosts=(HostLink(name="machine"),), collective="tree")
    with pytest.raises(UsageError, match="one rank exchanges nothing"):
        check_request(known, alone)


@pytest.mark.parametrize(
    ("pays", "even", "said"),
    [
        ((True, False), (2e6,), "below 2 Mbit/s"),
        ((False, True), (2e6,), "above 2 Mbit/s"),
        ((True, False, True), (2e6, 8e6), "below 2 Mbit/s, and above 8 Mbit/s"),
        ((False, True, False), (2e6, 8e6), "between 2 Mbit/s and 8 Mbit/s"),
        ((True, False, True, False), (2e6, 8e6, 5e7), "below 2 Mbit/s, and between 8 Mbit/s and 50 Mbit/s"),
    ],
)
def test_every_stretch_on_which_compression_pays_is_told(
    pays: tuple[bool, ...], even: tuple[float, ...], said: str
) -> None:
    known = calibration()
    assert where_it_pays(check(PredictConfig(compressor="topk"), known), pays, even) == [f"compression pays {said}"]


def test_a_map_of_many_ranks_compares_with_the_fastest_dense_collective() -> None:
    known, job = calibration(), request_from_options(PredictConfig(hosts=80, latency="20ms"))
    regime = regimes(known, [job], [1e7])[0]
    times_s = [predicted(known, pair.at_rate(1e7)).step_time_s for pair in pairs(job, ["bf16"])]
    assert regime["dense_step_time_s"] == min(times_s)
