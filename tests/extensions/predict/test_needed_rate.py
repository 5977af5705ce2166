"""`bench predict --needed-rate`: the slowest link on which a step reaches a share of the speed without an exchange."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.estimate import estimated
from bench.extensions.predict.fastest import fastest
from bench.extensions.predict.needed_rate import SHARES, MethodNeeds, needs
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.ranking import on_each_collective
from bench.extensions.predict.request import ACK_SHARE, FRAME_PER_PAYLOAD, request_from_options
from tests.extensions.predict.calibrations import NUMEL, calibration, written, written_profile
from tests.testing.invoke import invoke

ALONE_S = 0.4  # a step of `calibration` without an exchange


def found(known: Calibration, **options: object) -> dict[str, MethodNeeds]:
    job = request_from_options(PredictConfig(**{"hosts": 4} | options))  # type: ignore[arg-type]
    methods, _ = needs(known, dataclasses.replace(job, compressor=options.get("compressor", "")))
    return {each.compressor: each for each in methods}


@pytest.mark.parametrize("latency", [None, "5ms"])
def test_a_step_reaches_the_share_at_the_rate_and_no_longer_on_a_slower_link(latency: str | None) -> None:
    known = calibration()
    for name, method in found(known, latency=latency).items():
        job = request_from_options(PredictConfig(hosts=4, compressor=name, latency=latency))
        ways = on_each_collective(known, job)
        assert [each.bandwidth_bps is None for each in method.rates] == [method.most < share for share in SHARES]
        reached = [each for each in method.rates if each.bandwidth_bps is not None]
        assert len(reached) >= 2, name
        for each in reached:
            at_rate, slower = (
                fastest(known, [way.at_rate(factor * each.bandwidth_bps) for way in ways]).prediction.step_time_s
                for factor in (1.0, 0.98)
            )
            assert at_rate <= ALONE_S / each.share < slower
            assert at_rate == each.step_time_s
        assert all(slow.bandwidth_bps < fast.bandwidth_bps for slow, fast in itertools.pairwise(reached))  # type: ignore[operator]


def test_the_rate_is_that_at_which_the_bytes_pass_in_time() -> None:
    """Buckets are ready after 0.25 s and 0.35 s, and the update takes 0.05 s: 0.5 s are left for a step of 0.8 s."""
    (half, *_) = found(calibration(), hosts=2, compressor="none", collective="ring")["none"].rates
    assert (half.share, half.collective, half.link) == (0.5, "ring", "Wi-Fi")
    assert half.bandwidth_bps == pytest.approx(8 * 2 * 4 * NUMEL / 0.5 * FRAME_PER_PAYLOAD * (1 + ACK_SHARE), rel=0.01)


def test_local_steps_need_a_slower_link() -> None:
    every, tenth = (
        found(calibration(), compressor="none", strategy=name)["none"] for name in ("ddp", "local:steps=10")
    )
    assert tenth.main.bandwidth_bps < 0.3 * every.main.bandwidth_bps  # type: ignore[operator]


def slow_encoding() -> dict[str, object]:
    """Return the messages of `calibration`, with a `topk` that takes longer than backward to encode."""
    known = calibration()
    slow = tuple(dataclasses.replace(each, work_s=(0.15, 0.01)) for each in known.encoded["topk"])
    return known.encoded | {"topk": slow}


def test_a_method_whose_encoding_takes_too_long_never_gets_there(tmp_path: Path) -> None:
    path = written(tmp_path, encoded=slow_encoding())
    asked = ["predict", "--calibration", path, "--hosts", "4", "--needed-rate"]
    answer, told = invoke(*asked), json.loads(invoke(*asked, "--json").out)
    assert answer.code == 0, answer.error
    rows = {line.split()[0]: line for line in answer.out.splitlines() if line.strip()}
    assert rows["topk"].count("never") == 4
    assert rows["bf16"].count("never") == 1  # 0.02 s of encoding and decoding remain after backward
    *_, last = told["needed_rates"]
    assert (last["compressor"], told["step_without_exchange_s"]) == ("topk", pytest.approx(ALONE_S))
    assert 0.5 < last["most"] < 0.8
    assert [each["bandwidth_bps"] is None for each in last["rates"]] == [False, True, True, True, True]
    assert last["rates"][1] == {"share": 0.8} | dict.fromkeys(("bandwidth_bps", "collective", "step_time_s", "link"))


def test_a_number_of_parameters_is_enough_and_the_answer_is_drawn(tmp_path: Path) -> None:
    asked = ["predict", "--parameters", "20M", "--step-time", "250ms", "--world-size", "8", "--needed-rate",
             "--compressor", "bf16"]  # fmt: skip
    answer = invoke(*asked)
    assert answer.code == 0, answer.error
    assert answer.out.startswith("a model of equal layers, 20 million parameters\n8 ranks, a step without an exchange")
    assert "Rough estimate from 19 equal square matrices, a step of 250 ms" in answer.out
    told = json.loads(invoke(*asked, "--json").out)
    (method,) = told["needed_rates"]
    assert [each["share"] for each in method["rates"]] == [*SHARES]
    # 80 % leave a quarter of 250 ms after backward, but sums begin during backward.
    nbytes = 2 * 7 / 8 * 2 * told["num_parameters"]
    assert 8 * nbytes / 0.3125 < method["rates"][1]["bandwidth_bps"] < 8 * nbytes / 0.0625
    (tmp_path / "needed.json").write_text(json.dumps(told))
    drawn = invoke("plot", "needed-rate", str(tmp_path / "needed.json"), "--out", str(tmp_path / "needed.svg"))
    assert drawn.code == 0, drawn.error
    picture = (tmp_path / "needed.svg").read_text()
    assert f"bf16: 50% at {method['rates'][0]['bandwidth_bps'] / 1e9:.3g} Gbit/s" in picture


def test_equal_buckets_have_the_messages_of_the_first() -> None:
    known = estimated(PredictConfig(parameters="124M", step_time="250ms", compressor="topk"))
    assert known.numel == pytest.approx(124e6, rel=1e-3)
    first, second, *_ = known.encoded["topk"]
    assert [each.nbytes for each in first.offers] == [each.nbytes for each in second.offers]
    layers = [layer for bucket in known.encoded["topk"] for offer in bucket.offers for layer in offer.layers]
    assert sorted(layers) == list(range(len(layers)))
    assert len(layers) == sum(len(bucket.layers) for bucket in known.buckets)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--parameters", "124M"], "--parameters needs the time of a step without an exchange too; give --step-time"),
        (["--parameters", "many", "--step-time", "1s"], "'many' is not a number from 1 to 10B; write it like 124M"),
        (["--parameters", "1M", "--step-time", "1s", "--model", "mlp"], "leave out --model"),
        (["--parameters", "1M", "--step-time", "1s", "--world-size", "1"], "one rank exchanges nothing; give"),
        (["--parameters", "1M", "--from-profile", "PROFILE"], "leave out --parameters"),
        (["--parameters", "1M", "--calibration", "FILE"], "leave out --calibration"),
        (["--calibration", "FILE", "--bandwidth", "1gbit"], "sets the rate of all links; leave out --bandwidth"),
        (["--calibration", "FILE", "--network", "wifi"], "sets the rate of all links; leave out --network"),
        (["--calibration", "FILE", "--uplink-trace", "examples/cell.trace"], "leave out --uplink-trace"),
        (["--calibration", "FILE", "--cluster", "examples/edge.toml"], "remove the rates of the hosts"),
        (["--calibration", "FILE", "--sweep", "bandwidth=1mbit..1gbit"], "finds rates by itself; leave out --sweep"),
        (["--calibration", "FILE", "--device", "cuda"], "--device is for a rough estimate with --step-time"),
        (["--calibration", "FILE", "--hosts", "1", "--ranks-per-host", "2"], "the ranks of one host need no link"),
        (["--calibration", "FILE", "--strategy", "async_server"], "ranks that wait for each other; leave out"),
        (["--calibration", "FILE", "--compressor", "topk", "--losses", "every=6h,restart=3s,checkpoint=9"],
         "a single prediction; leave out --needed-rate"),
        ([], "for a rough estimate"),
    ],
)  # fmt: skip
def test_what_has_no_needed_rate_is_refused_in_a_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"FILE": written(tmp_path), "PROFILE": written_profile(tmp_path)}
    here = [str(Path(each).absolute()) if each.startswith("examples/") else files.get(each, each) for each in arguments]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    answer = invoke("predict", "--needed-rate", *here)
    assert (answer.code, answer.out) == (2, "")
    assert sentence in answer.error
    assert "\n" not in answer.error
