"""Predicted steps of `--strategy local`, compared with times computed by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench.core.errors import UsageError
from bench.extensions.predict.calibration import LOCAL, MessageCosts
from bench.extensions.predict.estimate import estimated
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.ranking import pairs, regimes
from bench.extensions.predict.request import ACK_SHARE, FRAME_PER_PAYLOAD, check, predicted, request_from_options
from tests.extensions.predict.calibrations import calibration
from tests.testing.invoke import invoke

MEGABIT = 1e6 / 8 / FRAME_PER_PAYLOAD / (1 + ACK_SHARE)
"""Payload bytes per second of a link that carries as much in the other direction."""
ALONE_S, UPDATE_S = 0.4, 0.05
EXCHANGE_S = 1_000_000 / (10 * MEGABIT)
"""Two ranks exchange 1 MB each at 10 Mbit/s."""


def step(strategy: str, **asked: Any) -> Prediction:
    known = calibration(**asked.pop("known", {}))
    return predicted(known, check(PredictConfig(**{"strategy": strategy, "collective": "ring"} | asked), known))


def test_an_exchange_is_shared_by_the_steps_before_it() -> None:
    prediction = step("local:steps=10", bandwidth="10mbit")
    assert prediction.step_time_s == pytest.approx(ALONE_S + (EXCHANGE_S + UPDATE_S) / 10, rel=1e-4)
    assert prediction.exposed_s == pytest.approx(prediction.step_time_s - ALONE_S)
    assert prediction.payload_bytes_per_step == 100_000
    assert prediction.compression_ratio == 10
    assert prediction.bound_by == "network"
    assert step("local:steps=100", bandwidth="10mbit").bound_by == "compute"


def test_encoding_and_decoding_are_part_of_an_exchange() -> None:
    prediction = step("local:steps=10", compressor="bf16")
    assert prediction.step_time_s == pytest.approx(ALONE_S + (2 * 0.01 + 2 * 0.01 + UPDATE_S) / 10)
    assert prediction.encode_s == pytest.approx(4 * 0.01 / 10)


def test_fragments_send_as_much_in_more_messages() -> None:
    whole, parts = (step(f"local:steps=10,fragments={number}", bandwidth="10mbit") for number in (1, 5))
    assert parts.payload_bytes_per_step == whole.payload_bytes_per_step
    assert parts.messages_per_step == 5 * whole.messages_per_step
    assert parts.step_time_s == pytest.approx(ALONE_S + (EXCHANGE_S / 5 + UPDATE_S / 5) / 2, rel=1e-4)


def waited_s(prediction: Prediction, interval: int, fragments: int = 1) -> float:
    """Return the seconds of an exchange that the steps before it do not hide, without the outer step."""
    return (prediction.step_time_s - ALONE_S) * interval - UPDATE_S / fragments


def test_all_work_on_a_fragment_is_its_share_of_the_whole() -> None:
    """Two buckets are encoded, packed, sent, received and decoded, and one other rank's values are added."""
    known = calibration(messages={LOCAL: MessageCosts(per_byte_s=1e-6)})
    worked = [
        dataclasses.replace(
            bucket, offers=tuple(dataclasses.replace(offer, pack_s=0.02, decode_s=0.04) for offer in bucket.offers)
        )
        for bucket in known.encoded["topk"]
    ]
    figures = {"messages": known.messages, "encoded": known.encoded | {"topk": tuple(worked)}}
    whole, parts = (
        step(f"local:steps=10,fragments={number}", compressor="topk", collective="allgather", known=figures)
        for number in (1, 5)
    )
    sent = 10 * whole.payload_bytes_per_step
    assert sent == pytest.approx(2 * 5016, rel=0.01)
    assert waited_s(whole, 10) == pytest.approx(2 * (0.03 + 0.02 + 0.01 + 0.04) + 2e-6 * sent)
    assert waited_s(parts, 2, 5) == pytest.approx(waited_s(whole, 10) / 5)


def test_work_for_messages_grows_with_their_number() -> None:
    known = {"messages": {LOCAL: MessageCosts(message_s=0.01)}}
    whole, parts = (step(f"local:steps=10,fragments={number}", known=known) for number in (1, 5))
    assert waited_s(whole, 10) == pytest.approx(waited_s(parts, 2, 5))


def test_after_a_long_silence_connections_are_as_slow_as_new_ones() -> None:
    soon, late = (
        waited_s(step(f"local:steps={steps}", bandwidth="100mbit", latency="50ms"), steps) for steps in (1, 1000)
    )
    assert late > soon + 0.05


def test_a_delay_hides_the_exchange_but_not_the_update() -> None:
    hidden = step("local:steps=10,delay=3", bandwidth="10mbit")
    assert hidden.step_time_s == pytest.approx(ALONE_S + UPDATE_S / 10)
    partly = step("local:steps=10,delay=1", bandwidth="10mbit")
    assert partly.step_time_s == pytest.approx(ALONE_S + (EXCHANGE_S - ALONE_S + UPDATE_S) / 10, rel=1e-4)


def test_all_wait_for_a_slow_rank_at_the_exchange() -> None:
    """Forward and backward, 0.3 s, take three times as long on rank 1."""
    prediction = step("local:steps=10", straggler="rank=1,slowdown=3")
    assert prediction.step_time_s == pytest.approx(ALONE_S + 2 * 0.3 + UPDATE_S / 10)


def test_ranks_that_arrive_early_send_early(tmp_path: Path) -> None:
    """Rank 0 needs 1.7 s to send its difference; rank 1, which is slow, takes 1 s for a step."""
    path = tmp_path / "hosts.toml"
    other = '[[host]]\nuplink = "10gbit"\ndownlink = "10gbit"\n'
    path.write_text('[[host]]\nuplink = "5mbit"\ndownlink = "10gbit"\n' + other, encoding="utf-8")
    asked = {"cluster_file": str(path), "straggler": "rank=1,slowdown=3", "collective": "allgather"}
    once, twice = (step(f"local:steps={steps}", **asked).step_time_s for steps in (1, 2))
    assert once > 1.6
    assert twice == pytest.approx(1.0 + UPDATE_S / 2, abs=0.001)


SLOW_S = 3 * 0.3 + 0.1
"""A step of a rank whose forward and backward, 0.3 s, take three times as long."""


@pytest.mark.parametrize(("seconds", "steps"), [(2, (5, 2)), (1, (3, 1))])
def test_a_slow_rank_makes_fewer_steps_with_steps_by_speed(seconds: int, steps: tuple[int, int]) -> None:
    """A step of the run is two of these steps, whichever rank makes them."""
    strategy, straggler = f"local:steps=auto,seconds={seconds}", "rank=1,slowdown=3"
    prediction, interval = step(strategy, straggler=straggler), sum(steps) / 2
    trained_s = steps[0] * ALONE_S, steps[1] * SLOW_S
    assert prediction.step_time_s == pytest.approx((max(trained_s) + UPDATE_S) / interval)
    assert prediction.samples_per_s == pytest.approx(2 * calibration().batch_size / prediction.step_time_s)
    assert prediction.exposed_s == pytest.approx(prediction.step_time_s - sum(trained_s) / 2 / interval)
    assert prediction.payload_bytes_per_step == pytest.approx(1_000_000 / interval)
    assert prediction.bound_by == "compute"
    once, twice = (step(f"local:steps={number}", straggler=straggler).cpu_s_per_step for number in (1, 2))
    exchanged_cpu_s = 2 * (once - twice)
    assert prediction.cpu_s_per_step == pytest.approx(once + exchanged_cpu_s * (1 / interval - 1))


def test_exchanges_by_speed_become_rarer_on_a_slow_link() -> None:
    """Ranks compute five times as long as an exchange takes."""
    prediction = step("local:steps=auto,seconds=0.1", bandwidth="1mbit")
    exchange_s = 10 * EXCHANGE_S + UPDATE_S
    interval = round(5 * exchange_s / ALONE_S)
    assert prediction.step_time_s == pytest.approx(ALONE_S + exchange_s / interval, rel=0.01)
    assert prediction.payload_bytes_per_step == pytest.approx(1_000_000 / interval, rel=0.02)


@pytest.mark.parametrize(
    ("strategy", "asked", "sentence"),
    [
        ("elastic:quorum=1", {}, "steps of elastic cannot be predicted; choose ddp, local"),
        ("local", {"bandwidth_trace": "examples/cell.trace"}, "a rate that changes over time cannot be predicted"),
        ("local", {"trigger": "sync"}, "waits for all ranks in every step"),
        ("local:average=senders", {}, "needs"),
    ],
)
def test_what_cannot_be_predicted_is_refused(strategy: str, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        step(strategy, **asked)


ROUGHLY = ("predict", "--model", "resnet20", "--step-time", "100ms", "--hosts", "4")


def test_buckets_with_different_numbers_of_messages_are_joined() -> None:
    """PowerSGD sends one message for a bucket of small layers, which it does not compress, and more for others."""
    known = calibration()
    first, second = known.encoded["bf16"]
    twice = dataclasses.replace(first, work_s=(0.01, 0.02, 0.01), offers=first.offers * 2)
    prediction = step("local:steps=10", compressor="bf16", known={"encoded": known.encoded | {"bf16": (twice, second)}})
    assert prediction.payload_bytes_per_step == 3 * 2 * 125_000 / 10
    assert waited_s(prediction, 10) == pytest.approx(0.01 + 0.01 + 0.02 + 0.01 + 0.01)


def test_the_baseline_is_dense_with_ddp() -> None:
    answer = invoke(*ROUGHLY, "--bandwidth", "5mbit", "--strategy", "local:preset=sparseloco", "--compressor", "topk")
    assert "times as fast as with dense bf16 with ddp on" in answer.out


def test_a_sweep_tries_only_what_can_run() -> None:
    """dgc owns the momentum, and local refuses that; average=senders needs allgather."""
    known = estimated(PredictConfig(model="linear", step_time="10ms", strategy="local"))
    job = request_from_options(PredictConfig(strategy="local:average=senders", hosts=4))
    tried = list(pairs(job, known.encoded))
    assert {pair.collective for pair in tried} == {"allgather"}
    assert "dgc" not in {pair.compressor for pair in tried}
    assert regimes(known, [job], [1e6])[0]["speedup"] > 1
