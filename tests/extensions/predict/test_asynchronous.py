"""Predicted steps of asynchronous ranks, and of ranks that wait for a slow one."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, cast

import numpy as np
import pytest

from bench.core import spec
from bench.core.errors import UsageError
from bench.extensions.async_server.strategy import AsyncServer
from bench.extensions.predict.asynchronous import AsyncPrediction, predict_async
from bench.extensions.predict.calibration import (
    FRAMES,
    LOCAL,
    SEGMENTS,
    BucketParts,
    Calibration,
    CpuContention,
    MessageCosts,
)
from bench.extensions.predict.contention import Job
from bench.extensions.predict.links import Links
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.request import ACK_SHARE, FRAME_PER_PAYLOAD, check, predicted
from bench.extensions.predict.validation import cells_of, notes, with_validated
from bench.launch.sweep_file import PlannedRun
from tests.extensions.predict.calibrations import NUMEL, calibration
from tests.testing.configs import make_config

MEGABIT = 1e6 / 8 / FRAME_PER_PAYLOAD
"""Payload bytes per second of a link without traffic in the other direction."""
PUSHED = 2 * (16 + 4 * NUMEL) + 24
"""Bytes of two layers and of the message that ends the clock."""
ANSWERED = PUSHED
SLOW = "rank=1,slowdown=3"


def step(known: Calibration | None = None, **asked: Any) -> AsyncPrediction:
    known = known or calibration(update_s=0.0)
    prediction = predicted(known, check(PredictConfig(**{"strategy": "async_server:mode=asp"} | asked), known))
    return cast(AsyncPrediction, prediction)


def one_bucket(**other: Any) -> Calibration:
    """Return the artificial model with one bucket, which is ready when backward ends."""
    known = calibration()
    bucket = BucketParts(ready_s=0.2, layers=(0,), numels=(NUMEL,))
    crowds = tuple(dataclasses.replace(crowd, handed_over_s=crowd.handed_over_s[1:]) for crowd in known.crowds)
    encoded = {name: parts[:1] for name, parts in known.encoded.items()}
    return dataclasses.replace(known, buckets=(bucket,), crowds=crowds, encoded=encoded, first_epoch={}, **other)


def test_a_rank_alone_with_its_server_takes_its_own_way_there_and_back() -> None:
    """The first bucket is ready after 0.25 s; 1 MB goes up at 10 Mbit/s, and as much comes down."""
    seconds = 0.25 + (PUSHED + ANSWERED) / (10 * MEGABIT)
    assert step(bandwidth="10mbit").step_times_s[1] == pytest.approx(seconds)
    assert step(bandwidth="10mbit", latency="20ms").step_times_s[1] == pytest.approx(seconds + 2 * 0.020)


def test_work_for_messages_is_done_at_both_ends() -> None:
    """Two layers and two control messages; the rank waits only for the last bucket, which is ready after 0.35 s."""
    known = calibration(update_s=0.0, messages={LOCAL: MessageCosts(message_s=0.001, wake_s=0.002)})
    seconds = 0.35 + 2 * (2 * 0.001) + 2 * (3 * 0.001) + 2 * 0.002
    assert step(known).step_times_s[1] == pytest.approx(seconds, abs=1e-6)
    assert step(known).step_times_s[0] == pytest.approx(0.35)


def test_the_rank_that_serves_needs_no_link() -> None:
    assert step(bandwidth="10mbit").step_times_s[0] == pytest.approx(0.35)
    assert step(strategy="async_server:mode=asp,root=1", bandwidth="10mbit").step_times_s[1] == pytest.approx(0.35)


def test_equal_ranks_are_as_fast_as_the_servers_link_carries_their_answers() -> None:
    """Compressed pushes are short; their acknowledgements use little of the server's link."""
    prediction = step(compressor="topk", hosts=8, bandwidth="10mbit")
    per_second = sum(1 / seconds for seconds in prediction.step_times_s[1:])
    assert per_second == pytest.approx(10 * MEGABIT / ANSWERED, rel=0.01)
    assert prediction.bound_by == "network"


def test_without_a_bound_nobody_waits_for_a_slow_rank() -> None:
    prediction = step(hosts=4, straggler=SLOW)
    assert prediction.step_times_s == pytest.approx((0.35, 0.05 + 3 * 0.3, 0.35, 0.35), abs=1e-6)
    assert prediction.bound_by == "compute"
    updates = 3 / 0.35 + 1 / 0.95
    assert prediction.updates_per_s == pytest.approx(updates, rel=0.02)
    assert prediction.samples_per_s == pytest.approx(32 * updates, rel=0.02)


def test_within_a_bound_all_are_as_slow_as_the_slowest_and_never_staler() -> None:
    for staleness in (0, 1, 3):
        prediction = step(strategy=f"async_server:staleness={staleness}", hosts=4, straggler=SLOW)
        assert prediction.staleness_max == staleness
        assert prediction.step_times_s == pytest.approx((0.95,) * 4, abs=1e-6)
        assert prediction.updates_per_s == pytest.approx(1 / 0.95, rel=0.01)


def test_ranks_that_are_bound_go_in_step_and_all_but_one_are_as_stale_as_they_may_be() -> None:
    """Measured means were 0.74 with four ranks and a bound of 1, and 3.0 to 3.1 with six, one of them slow, and 4."""
    asked: dict[str, Any] = {"hosts": 4, "bandwidth": "10mbit", "compressor": "topk"}
    in_step = step(strategy="async_server", **asked)
    for staleness in (1, 1000):
        bound = step(strategy=f"async_server:staleness={staleness}", **asked)
        assert bound.step_times_s == in_step.step_times_s
        assert (bound.staleness_mean, bound.staleness_max) == (staleness * 3 / 4, staleness)


def test_gradients_of_equal_ranks_are_as_stale_as_there_are_others() -> None:
    """Between two pushes of one rank, every other rank pushes once."""
    prediction = step(hosts=6)
    assert prediction.staleness_mean == pytest.approx(5, rel=0.01)
    assert prediction.staleness_max == 5


@pytest.mark.parametrize(("compressor", "told_s"), [("none", 0.005), ("topk", 0.0)])
def test_without_staleness_a_step_is_that_of_ranks_that_sum_at_a_server(compressor: str, told_s: float) -> None:
    """Control messages differ, and the synchronous ranks also agree that all values are finite.

    Decoding takes the server's time or the ranks'. Ranks that decode for 0.01 s agree meanwhile.
    """
    known = one_bucket()
    asked = {"compressor": compressor, "hosts": 5, "bandwidth": "20mbit", "latency": "5ms"}
    together = step(known, strategy="ddp", collective="server", **asked)
    bounded = step(known, strategy="async_server", **asked)
    assert bounded.step_time_s == pytest.approx(together.step_time_s - told_s, rel=1e-3)
    assert bounded.samples_per_s == pytest.approx(32 * 5 / bounded.step_time_s, rel=1e-6)
    assert bounded.staleness_max == 0


def test_a_straggler_makes_every_step_that_all_wait_for_as_slow_as_it_computes() -> None:
    crowds = (CpuContention(load=1.0, handed_over_s=(0.2, 0.3), computed_s=0.3, cpu_s=0.3),)
    known = calibration(batch_s=0.0, update_s=0.0, crowds=crowds)
    alone = step(known, strategy="ddp", collective="ring", hosts=4).step_time_s
    for slowdown in (1, 2, 5):
        slow = step(known, strategy="ddp", collective="ring", hosts=4, straggler=f"rank=2,slowdown={slowdown}")
        assert slow.step_time_s == pytest.approx(slowdown * alone)
        assert slow.bound_by == "compute"


def test_a_straggler_hands_over_its_last_bucket_alone_late() -> None:
    """The first of two buckets of 0.4 s is sent while the straggler sleeps for 0.6 s."""
    slow = step(calibration(), strategy="ddp", collective="ring", bandwidth="10mbit", straggler=SLOW)
    assert slow.step_time_s == pytest.approx(0.35 + 0.6 + 500_000 * (1 + ACK_SHARE) / (10 * MEGABIT) + 0.05, rel=1e-4)


def test_a_server_that_has_more_to_apply_than_time_sets_the_pace() -> None:
    prediction = step(calibration(update_s=0.2), hosts=4)
    assert prediction.updates_per_s == pytest.approx(1 / 0.2, rel=1e-6)
    assert prediction.bound_by == "server"


def test_pushes_that_are_applied_together_are_decoded_one_by_one() -> None:
    """Four ranks push two buckets each."""
    known = calibration(update_s=0.0)
    decoded = tuple(
        dataclasses.replace(bucket, offers=(dataclasses.replace(bucket.offers[0], decode_s=0.02),))
        for bucket in known.encoded["none"]
    )
    known = dataclasses.replace(known, encoded=known.encoded | {"none": decoded})
    prediction = step(known, strategy="async_server", hosts=4)
    assert prediction.step_time_s == pytest.approx(0.35 + 3 * 2 * 0.02, abs=1e-6)


def test_bytes_are_those_of_pushes_and_answers() -> None:
    """Three ranks push and get answers in each of their steps; the serving rank sends nothing for its own steps."""
    prediction = step(compressor="topk", strategy="async_server", hosts=4)
    up, down = 2 * (16 + 5000), 2 * (16 + 4 * NUMEL)
    assert prediction.payload_bytes_per_step == pytest.approx(3 / 4 * (up + down))
    assert prediction.payload_bytes_max_per_step == pytest.approx(3 * down)
    assert prediction.messages_per_step == pytest.approx(3 / 4 * 4)


def test_layers_that_a_bucket_holds_in_one_payload_are_pushed_one_by_one() -> None:
    bucket = BucketParts(ready_s=0.2, layers=(1, 0), numels=(NUMEL - 7, 7))
    prediction = step(dataclasses.replace(one_bucket(), buckets=(bucket,)), strategy="async_server")
    assert prediction.payload_bytes_per_step == pytest.approx(2 * (2 * 16 + 4 * NUMEL) / 2)
    assert prediction.messages_per_step == 2 * 2 / 2


def test_ranks_on_shared_cores_make_no_more_steps_than_these_can_compute() -> None:
    prediction = step(calibration(cores=2, update_s=0.0), hosts=8, shared_cores=2)
    assert prediction.samples_per_s == pytest.approx(32 * 2 / 0.35, rel=0.01)


def test_a_rank_that_waits_for_a_link_leaves_the_cores_to_others() -> None:
    """Two ranks share a core: on a fast link both always compute, on a slow one the other rarely does."""
    known = calibration(cores=1, update_s=0.0)
    asked = {"hosts": 2, "shared_cores": 1}
    assert step(known, **asked).step_times_s == pytest.approx((0.7, 0.7), rel=1e-3)
    serving, pushing = step(known, bandwidth="1mbit", **asked).step_times_s
    assert serving == pytest.approx(0.35, rel=0.05)
    assert pushing == pytest.approx(0.5 + (PUSHED + ANSWERED) / MEGABIT, rel=0.05)


def test_what_carries_frames_takes_the_cores_that_ranks_share() -> None:
    carried = MessageCosts(carry_byte_s=4e-6)
    known = calibration(cores=2, messages={LOCAL: MessageCosts(), SEGMENTS: carried, FRAMES: carried})
    prediction = step(known, strategy="async_server", hosts=2, shared_cores=2)
    assert prediction.bound_by == "cpu"
    cpu_s = 2 * 0.35 + 0.05 + (PUSHED + ANSWERED) * 4e-6
    assert prediction.step_time_s == pytest.approx(cpu_s / 2, rel=1e-3)
    assert prediction.samples_per_s == pytest.approx(32 * 2 / prediction.step_time_s, rel=1e-3)
    together = step(known, strategy="async_server", hosts=1, ranks_per_host=2, shared_cores=2)
    assert together.step_time_s < 0.5


@pytest.mark.long
def test_faster_links_looser_bounds_and_quicker_ranks_make_nothing_slower() -> None:
    def ascends(*each: dict[str, Any]) -> bool:
        speeds = [step(**{"hosts": 4} | asked).samples_per_s for asked in each]
        return all(after >= before * (1 - 1e-3) for before, after in itertools.pairwise(speeds))

    bounds = [{"strategy": f"async_server:{bound}"} for bound in ("staleness=0", "staleness=2", "mode=asp")]
    for bound in bounds:
        assert ascends(*(bound | {"bandwidth": rate} for rate in ("1mbit", "10mbit", "100mbit")))
        assert ascends(*(bound | {"straggler": f"rank=1,slowdown={slowdown}"} for slowdown in (8, 1)))
    assert ascends(*(bound | {"bandwidth": "30mbit", "straggler": SLOW} for bound in bounds))


def test_a_prediction_repeats_by_its_seed() -> None:
    known, rates = calibration(), np.full(3, 1e6)
    strategy = cast(AsyncServer, spec.build("strategies", "async_server:mode=asp"))
    job = Job(
        encoded=known.encoded["bf16"],
        links=Links(host_of=np.arange(3), up_rate=rates, down_rate=rates, latency_s=np.zeros(3)),
        slower=np.array([1.0, 1.1, 1.3]),
        load=1.0,
    )
    predictions = [predict_async(known, job, strategy, seed) for seed in (1, 1, 2)]
    assert predictions[0] == predictions[1] != predictions[2]


def test_what_would_take_for_ever_is_refused() -> None:
    with pytest.raises(UsageError, match="2000 ranks of async_server cannot be simulated; choose at most 512"):
        step(hosts=2000)


def test_what_was_measured_with_a_strategy_and_a_straggler_says_nothing_of_others() -> None:
    """Such a run has no buckets, since every layer is sent separately."""
    known = calibration()
    config = make_config(
        model="small_cnn", bucket_mb=None, strategy="async_server:staleness=2", collective="server", straggler=SLOW
    )
    (cell,) = cells_of(known, [PlannedRun(settings={}, config=config)])
    assert cell.request.strategy == "async_server:staleness=2"
    assert cast(AsyncPrediction, cell.prediction).staleness_max == 2
    measured = dataclasses.replace(cell, num_runs=1, measured={"step_time_s": 1.0})
    known = with_validated(known, [measured])
    assert Calibration.of(dataclasses.asdict(known)) == known

    def said(**other: Any) -> list[str]:
        asked = {"strategy": "async_server:staleness=2", "straggler": SLOW, "hosts": 1, "ranks_per_host": 2} | other
        return notes(known, check(PredictConfig(**asked), known))

    (known_error,) = said()
    assert known_error.startswith("Such step times were checked against 1 real run(s), whose ranks shared ")
    assert "1 rank(s) on a host were not measured" in said(hosts=2, ranks_per_host=1)[0]
    assert "async_server:staleness=2 without a straggler, trigger async, was not measured" in said(straggler=None)[0]
    assert "ddp with the straggler rank=1,slowdown=3, trigger async, was not measured" in said(strategy="ddp")[0]
