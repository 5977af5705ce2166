"""`bench calibrate` and `bench predict`: measured parts become predicted steps, and one sentence for bad input."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import statistics
from pathlib import Path

import pytest

from bench.core.rows import RowWriter
from bench.core.schema import METRICS_BY_NAME
from bench.core.units import format_bytes, format_seconds
from bench.extensions.predict.calibration import VERSION
from bench.extensions.predict.columns import COLUMNS
from tests.extensions.predict.calibrations import calibration, written
from tests.testing.invoke import execute, invoke, start


@pytest.mark.long
def test_calibrated_parts_predict_the_bytes_that_are_sent(tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    answer = execute(
        "calibrate", "--model", "small_cnn", "--batch-size", "8", "--compressors", "none,topk", "--repeats", "3",
        "--turns", "1", "--no-virtual-hosts", "--out", str(out),
    )  # fmt: skip
    assert answer.code == 0, answer.error
    assert re.match(
        r"\[1/10\] messages between two processes\n\[2/10\] one rank computing, about \d+ s left\n", answer.error
    )
    parts = json.loads(out.read_text())
    assert (parts["cut"], list(tmp_path.glob("*.parts"))) == ([], [])
    assert parts["forward_s"] > 0
    assert list(parts["messages"]) == ["local"]
    assert parts["messages"]["local"]["message_s"] > 0
    assert parts["around_message_s"] > 0
    (offer, *_) = parts["encoded"]["topk"][0]["offers"]
    assert min(offer["pack_s"], offer["decode_s"], *(sum(offer[work].values()) for work in ("unpack", "merge"))) > 0
    loads = [crowd["load"] for crowd in parts["crowds"]]
    assert loads == sorted(loads)
    assert all(
        parts["forward_s"] < crowd["handed_over_s"][0] <= crowd["handed_over_s"][-1] <= crowd["computed_s"]
        for crowd in parts["crowds"]
    )
    ready = [bucket["ready_s"] for bucket in parts["buckets"]]
    assert ready == sorted(ready)
    answer = invoke(
        "predict", "--calibration", str(out), "--world-size", "3", "--compressor", "none", "--collective", "ring",
        "--bandwidth", "10mbit", "--json",
    )  # fmt: skip
    assert answer.code == 0, answer.error
    told = json.loads(answer.out)
    numel = sum(sum(bucket["numels"]) for bucket in parts["buckets"])
    assert told["payload_bytes_per_step"] == pytest.approx(2 * 2 / 3 * 4 * numel, rel=1e-4)
    assert set(told) - {"notes", "bound_by"} <= DECLARED
    assert told["step_time_s"] > told["payload_bytes_per_step"] * 8 / 10e6


def test_a_calibration_that_was_interrupted_goes_on_and_one_in_a_hurry_says_so(tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    asked = ["calibrate", "--batch-size", "8", "--compressors", "none,topk", "--no-virtual-hosts", "--budget", "1s",
             "--out", str(out)]  # fmt: skip
    process = start(*asked)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[4/10]"):
            process.send_signal(signal.SIGINT)
            break
    _, error = process.communicate()
    assert process.returncode == 130, error
    kept = len(json.loads(Path(f"{out}.parts").read_text())["parts"])
    assert kept >= 3
    said = f"{kept} part(s) are kept in {out}.parts; run the same command again to continue from there"
    assert error.splitlines()[-1] == f"bench: stopped by the user; {said}"
    answer = execute(*asked)
    assert answer.code == 0, answer.error
    assert answer.error.startswith(f"continuing with {kept} finished part(s) from {out}.parts\n[{kept + 1}/10] ")
    cut = json.loads(out.read_text())["cut"]
    assert "1 of 36 steps of several ranks at once" in cut
    assert f"with --budget 1s, not everything was repeated as often as planned: {cut[0]}" in answer.error
    assert not Path(f"{out}.parts").exists()
    assert f"The calibration had little time: {cut[0]}" in invoke("predict", "--calibration", str(out)).out


DECLARED = {*METRICS_BY_NAME, *(column.name for column in COLUMNS)}
CELL = ["--bandwidth-trace", "examples/cell.trace"]
PLAIN = ["--compressor", "none"]
LOSSES = ["--losses", "every=2h,restart=60s,checkpoint=100"]


def test_a_trace_is_followed_and_its_slowest_and_fastest_tenths_are_named(tmp_path: Path) -> None:
    pair = ["--compressor", "none", "--collective", "ring"]
    asked = ["predict", "--calibration", written(tmp_path), *pair, *CELL]
    answer = invoke(*asked, "--json")
    assert answer.code == 0, answer.error
    told = json.loads(answer.out)
    windows = [told.pop(f"{word}_window") for word in ("fastest", "slowest")]
    assert set(told) - {"notes", "bound_by"} <= DECLARED
    assert told["link_trace"].startswith("cell.trace (")
    assert windows[0]["step_time_s"] < told["step_time_s"] < windows[1]["step_time_s"]
    said = invoke(*asked).out
    assert "slowest tenth" in said
    assert f"from {windows[1]['begin_s']:.1f} s to {windows[1]['end_s']:.1f} s of the trace" in said


def test_people_read_whether_it_pays(tmp_path: Path) -> None:
    path = written(tmp_path)
    pays = invoke("predict", "--calibration", path, "--compressor", "topk", "--bandwidth", "1mbit")
    assert "times as fast as with dense bf16" in pays.out
    assert "Not yet checked against real runs on this machine" in pays.out
    fast = invoke("predict", "--calibration", path, "--compressor", "topk")
    assert "compression does not pay here" in fast.out
    curve = invoke("predict", "--calibration", path, "--compressor", "topk", "--sweep", "bandwidth=1mbit..10gbit")
    assert "compression pays below" in curve.out
    dense, whole = (
        invoke("predict", "--calibration", path, "--compressor", name, "--sweep", "bandwidth=1mbit..10gbit").out
        for name in ("bf16", "none")
    )
    assert "pay" not in dense
    assert "uncompressed in 32 bits is faster above" in whole


@pytest.mark.long
def test_compression_is_held_against_the_fastest_dense_sum(tmp_path: Path) -> None:
    asked = [
        "predict",
        "--calibration",
        written(tmp_path),
        "--compressor",
        "topk",
        "--hosts",
        "16",
        "--latency",
        "50ms",
    ]
    told = json.loads(invoke(*asked, "--json").out)
    assert told["dense_collective"] == "allgather"  # one round trip; a ring makes 30
    ring = json.loads(invoke(*asked[:3], "--compressor", "bf16", "--collective", "ring", *asked[5:], "--json").out)
    assert told["dense_step_time_s"] < ring["step_time_s"]
    assert "with dense bf16 on allgather, whose step takes" in invoke(*asked).out
    curve = json.loads(invoke(*asked, "--sweep", "bandwidth=1mbit..10gbit", "--json").out)
    assert (curve["latency_s"], curve["trigger"], curve["model"]) == (0.05, "async", "small_cnn")
    fastest = [point["dense_collective"] for point in curve["curve"]]
    assert fastest[-1] == "allgather"
    assert fastest[0] != "allgather"  # each rank sends its whole gradient to each other rank


def test_a_compressor_is_predicted_on_its_fastest_collective_too(tmp_path: Path) -> None:
    asked = ["predict", "--calibration", written(tmp_path), "--compressor", "topk", "--hosts", "16", "--json"]
    slow = [*asked, "--bandwidth", "1mbit"]
    told = json.loads(invoke(*slow).out)
    named = {name: json.loads(invoke(*slow, "--collective", name).out) for name in ("allgather", "halving_doubling")}
    steps = {name: each["step_time_s"] for name, each in named.items()}
    assert steps["halving_doubling"] < steps["allgather"]  # a run would choose it
    assert told["step_time_s"] <= steps["halving_doubling"]
    assert any("bench run uses allgather unless you add --collective" in note for note in told["notes"])
    assert not any("bench run uses" in note for each in named.values() for note in each["notes"])
    curve = json.loads(invoke(*asked, "--sweep", "bandwidth=1mbit..10mbit").out)["curve"]
    assert curve[0]["step_time_s"] == told["step_time_s"]
    assert curve[0]["collective"] == told["collective"]


def test_without_a_compressor_all_are_ranked(tmp_path: Path) -> None:
    asked = ["predict", "--calibration", written(tmp_path), "--hosts", "4", "--bandwidth", "10mbit"]
    told = json.loads(invoke(*asked, "--json").out)
    ranking = told["ranking"]
    assert {row["compressor"] for row in ranking} == {"none", "bf16", "topk"}
    assert [row["step_time_s"] for row in ranking] == sorted(row["step_time_s"] for row in ranking)
    for row in ranking:
        alone = json.loads(invoke(*asked, "--compressor", row["compressor"], "--json").out)
        assert all(row[name] == alone[name] for name in row.keys() & alone.keys())
        assert set(row) - {"bound_by"} <= DECLARED
    dense = next(row for row in ranking if row["compressor"] == "bf16")
    assert dense["times_as_fast"] == 1
    topk = next(row for row in ranking if row["compressor"] == "topk")
    first_s, first_nbytes = topk["first_epoch_step_time_s"], topk["first_epoch_payload_bytes_per_step"]
    assert first_nbytes == pytest.approx(20 * topk["payload_bytes_per_step"], rel=0.02)
    assert first_s > topk["step_time_s"]
    assert (dense["denser_epochs"], dense["first_epoch_step_time_s"]) == (0, None)
    lines = invoke(*asked).out.splitlines()
    assert lines[:2] == ["small_cnn on digits, 250,000 parameters", "4 ranks, at 10 Mbit/s"]
    assert max(map(len, lines[2:7])) <= 80
    (line,) = (line for line in lines if line.startswith(" topk "))
    assert line.rstrip().endswith(f"{format_seconds(first_s)}, {format_bytes(first_nbytes)}")
    assert any(line.startswith("first epoch: ") and "topk:warmup_epochs=0" in line for line in lines)
    assert lines[-1].startswith("Accuracy is not predicted: bench decide measures it")
    native = json.loads(invoke(*asked, "--collective", "native", "--json").out)
    assert {row["compressor"] for row in native["ranking"]} == {"none", "bf16"}
    assert any("topk is left out: " in note and "native adds tensors" in note for note in native["notes"])


def test_methods_within_the_error_of_predictions_are_one_group(tmp_path: Path) -> None:
    asked = ["predict", "--calibration", written(tmp_path), "--hosts", "4", "--bandwidth"]
    assert "ot told apart" not in invoke(*asked, "10mbit").out
    out = invoke(*asked, "60mbit").out
    table = out[out.index(" not told apart:") : out.index("Not told apart:")]
    ranking = json.loads(invoke(*asked, "60mbit", "--json").out)["ranking"]
    close = [row["compressor"] for row in ranking if not row["told_apart"]]
    assert [row["step_time_s"] <= 1.1 * ranking[0]["step_time_s"] for row in ranking] == [True, True, False]
    assert [words[0] for line in table.splitlines() if (words := line.split())] == [
        "not", *close, "slower:", ranking[-1]["compressor"]
    ]  # fmt: skip
    assert f"Not told apart: {close[0]} and {close[1]} differ by less than such predictions may be wrong (10%)" in out


def test_a_latency_that_is_not_given_is_said_to_be_taken_as_0(tmp_path: Path) -> None:
    path = written(tmp_path)
    said = "The one-way delay is taken as 0, because none is given; add --latency"
    for asked in ([], [*PLAIN], [*PLAIN, "--sweep", "bandwidth=1mbit..10mbit"], ["--sweep", "bandwidth=1mbit..10mbit"]):
        assert said in invoke("predict", "--calibration", path, *asked).out
    for given in (["--latency", "0ms"], ["--latency", "1ms"], ["--network", "adsl"]):
        assert said not in invoke("predict", "--calibration", path, *PLAIN, *given).out


@pytest.mark.long
def test_a_map_needs_dense_gradients_in_16_bits_alone(tmp_path: Path) -> None:
    encoded = {name: calibration().encoded[name] for name in ("bf16", "topk")}
    asked = ["--sweep", "bandwidth=1mbit..10mbit,world_size=2..6", "--latency", "2ms", "--json"]
    answer = invoke("predict", "--calibration", written(tmp_path, encoded=encoded), *asked)
    assert answer.code == 0, answer.error
    told = json.loads(answer.out)
    assert (told["latency_s"], told["model"]) == (0.002, "small_cnn")
    assert {cell["world_size"] for cell in told["regimes"]} == {2, 4, 6}


@pytest.mark.long
def test_people_read_how_fast_a_server_is_asked_and_how_stale_it_answers(tmp_path: Path) -> None:
    asked = ["predict", "--calibration", written(tmp_path), "--hosts", "4", "--compressor", "topk",
             "--strategy", "async_server:staleness=2", "--straggler", "rank=1,slowdown=3"]  # fmt: skip
    shown = invoke(*asked).out
    for text in ("topk on async_server:staleness=2, 4 ranks", "step of rank 0", "updates per second", "at most 2",
                 "times as many samples as with dense bf16"):  # fmt: skip
        assert text in shown
    told = json.loads(invoke(*asked, "--json").out)
    assert set(told) - {"notes", "bound_by", "updates_per_s", "step_times_s"} <= DECLARED
    assert (told["strategy"], told["straggler"]) == ("async_server:staleness=2", "rank=1,slowdown=3")
    assert told["staleness_max"] == 2
    assert len(told["step_times_s"]) == 4


def test_a_map_names_the_fastest_pair_everywhere_and_is_drawn(tmp_path: Path) -> None:
    path = written(tmp_path)
    asked = ["predict", "--calibration", path, "--sweep", "bandwidth=1mbit..1gbit,world_size=2..4"]
    answer = invoke(*asked, "--json")
    assert answer.code == 0, answer.error
    cells = json.loads(answer.out)["regimes"]
    assert {cell["world_size"] for cell in cells} == {2, 4}
    assert {cell["compressor"] for cell in cells if cell["bandwidth_bps"] == 1e6} == {"topk"}
    assert {cell["compressor"] for cell in cells if cell["bandwidth_bps"] == 1e9} == {"none"}  # it encodes nothing
    assert all(cell["speedup"] >= 1 for cell in cells)
    assert "topk+" in invoke(*asked).out
    drawn, curve = tmp_path / "map.json", tmp_path / "curve.json"
    drawn.write_text(answer.out)
    curve.write_text(
        invoke(
            "predict", "--calibration", path, "--compressor", "topk", "--sweep", "bandwidth=1mbit..1gbit", "--json"
        ).out
    )
    for kind, file in (("regime-map", drawn), ("predicted-curve", curve)):
        assert invoke("plot", kind, str(file), "--out", str(tmp_path)).code == 0
        assert "<svg" in (tmp_path / f"{kind}.svg").read_text()
    swapped = invoke("plot", "regime-map", str(curve), "--out", str(tmp_path))
    assert (swapped.code, "has no key 'regimes', or nothing in it; write it" in swapped.error) == (4, True)
    assert invoke("plot", "regime-map", "--out", str(tmp_path)).code == 2


def test_predictions_are_drawn_beside_what_was_measured(tmp_path: Path) -> None:
    table = Path("results/reference/predict-validation.csv")
    with table.open(newline="", encoding="utf-8") as file:
        median = statistics.median(abs(float(row["error"])) for row in csv.DictReader(file))
    assert invoke("plot", "predicted-measured", str(table), "--out", str(tmp_path / "errors.svg")).code == 0
    said = f"30 configurations, error: median {median:.1%}, 90th percentile"
    assert said in (tmp_path / "errors.svg").read_text()


@pytest.mark.long
def test_more_ranks_than_a_job_of_this_tool_can_have_are_predicted(tmp_path: Path) -> None:
    pair = ["--compressor", "none", "--collective", "tree"]
    answer = invoke("predict", "--calibration", written(tmp_path), "--hosts", "5000", *pair)
    assert (answer.code, answer.out.splitlines()[1]) == (0, "none on tree, 5000 ranks, on links without a limit")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (["--hosts", "2049", "--ranks-per-host", "2"], "choose at most 4096, or one rank per host"),
        (["--world-size", "16385"], "give 16384 or less"),
    ],
)
def test_more_ranks_than_can_be_simulated_are_refused_at_once(tmp_path: Path, asked: list[str], sentence: str) -> None:
    answer = invoke("predict", "--calibration", written(tmp_path), *asked)
    assert (answer.code, sentence in answer.error) == (2, True), answer.error


def test_what_is_said_first_tells_one_question_from_another(tmp_path: Path) -> None:
    asked = ["--hosts", "4", "--bandwidth", "10mbit", "--latency", "5ms", "--straggler", "rank=1,slowdown=3"]
    first = invoke("predict", "--calibration", written(tmp_path), "--compressor", "topk", *asked).out.splitlines()[1]
    assert first == "topk on allgather, 4 ranks, at 10 Mbit/s, one-way delay 5 ms, a straggler (rank=1,slowdown=3)"


def test_runs_say_how_many_steps_a_target_takes(tmp_path: Path) -> None:
    path, runs = written(tmp_path), tmp_path / "runs.csv"
    same = {
        "model": "small_cnn",
        "dataset": "digits",
        "optimizer": "sgd",
        "batch_size": 32,
        "compressor": "topk",
        "strategy": "ddp",
        "accumulate": 1,
        "steps": 200,
    }
    writer = RowWriter(runs)
    for step, seconds in ((100, None), (200, 50.0)):
        of_run = {
            "run_id": "a",
            "config_id": "c",
            "seed": 1,
            "strategy": "ddp",
            "collective": "ring",
            "status": "ok",
            "world_size": 2,
            "target_accuracy": 0.9,
        }
        writer.append(same | of_run | {"step": step, "time_to_target_s": seconds})
    asked = ["predict", "--calibration", path, "--compressor", "topk", "--steps-from", str(runs), "--json"]
    answer = invoke(*asked)
    assert answer.code == 0, answer.error
    told = json.loads(answer.out)
    assert told["steps_to_target"] == 200
    assert told["time_to_target_s"] == pytest.approx(200 * told["step_time_s"])
    lost = json.loads(invoke(*asked, *LOSSES).out)
    assert lost["losses"] == "every=7200s,restart=60s,checkpoint=100"
    assert lost["restarts_per_hour"] == 1  # two hosts, each lost every two hours
    assert lost["times_as_long_with_losses"] == pytest.approx(1 + (60 + 100 * told["step_time_s"] / 2) / 3600, rel=1e-3)
    assert lost["time_to_target_with_losses_s"] == pytest.approx(  # 200 steps are two checkpoint intervals
        told["time_to_target_s"] * lost["times_as_long_with_losses"]
    )
    shown = invoke(*asked[:-1], *LOSSES).out
    assert "with losses" in shown
    assert "1 restart(s) per hour; to the target" in shown
    part = ("--losses", "every=7200s,restart=60s,checkpoint=20000")
    often = json.loads(invoke(*asked, *part).out)
    assert often["time_to_target_with_losses_s"] < told["time_to_target_s"] * often["times_as_long_with_losses"] / 2
    more = json.loads(invoke(*asked, "--world-size", "64").out)
    assert more["time_to_target_s"] is None
    assert any("the number with 64 ranks is unknown" in note for note in more["notes"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--compressor", "dgc"], "dgc is not in the calibration, which holds none, bf16, topk"),
        (["--compressor", "topkk"], "there is no compressor 'topkk' (did you mean 'topk'?)"),
        (["--collective", "rign"], "there is no collective 'rign' (did you mean 'ring'?)"),
        (["--collective", "pool"], "pool does not say what its ranks send"),
        (["--collective", "hierarchical:inter=pool", "--world-size", "4"], "pool does not say what its ranks send"),
        (["--collective", "hierarchical:inter=server:root=5", "--world-size", "4"], "root=5 is none of the 2 ranks"),
        (["--compressor", "topk", "--collective", "native"], "native adds tensors element by element"),
        (["--collective", "server:root=7"], "root=7 is none of the 2 ranks"),
        (["--world-size", "1"], "one rank exchanges nothing"),
        (["--sweep", "bandwidth=1mbit..1gbit,world_size=8..2"], "world_size=8..2 is not possible"),
        (["--sweep", "bandwidth=1mbit..1gbit,latency=2..8"], "write it like bandwidth=1mbit..10gbit,world_size=2..64"),
        (["--sweep", "bandwidth=1mbit..1gbit,world_size=2..8", "--hosts", "4"], "leave out --hosts"),
        (["--steps-from", "none.csv", "--sweep", "bandwidth=1mbit..10mbit"], "--steps-from needs a single prediction"),
        (["--world-size", "5", "--hosts", "2"], "--world-size 5 is not 2 hosts with 1 rank(s) each"),
        (["--cluster", "x.toml", "--bandwidth", "1mbit"], "--cluster and --bandwidth both describe the hosts"),
        (["--bandwidth", "fast"], "'fast' is not a bandwidth"),
        (["--sweep", "bandwidth=1mbit..1gbit", "--uplink", "1mbit"], "--sweep sets the rate of all links"),
        (["--bandwidth-trace", "nowhere"], "the trace nowhere cannot be read: No such file"),
        (["--uplink-trace", "README.md"], "README.md"),
        ([*CELL, "--bandwidth", "1mbit"], "--bandwidth and --bandwidth-trace both set the uplink"),
        ([*CELL, "--sweep", "bandwidth=1mbit..1gbit"], "--sweep sets the rate of all links"),
        ([*CELL, "--sweep", "bandwidth=1mbit..1gbit,world_size=2..4"], "--sweep sets the rate of all links"),
        (["--cluster", "x.toml", *CELL], "--cluster and --bandwidth-trace both describe the hosts"),
        (["--validate", "x.toml", "--hosts", "3"], "x.toml predicts the configurations of that file"),
        (["--table", "x.csv"], "--table has a meaning only with --validate; leave it out"),
        (["--runs", "other"], "--runs has a meaning only with --validate; leave it out"),
        (["--cluster", "examples/edge.toml", "--sweep", "bandwidth=1mbit..1gbit"], "from the cluster file"),
        (["--validate", "examples", "--runs", "other"], "examples holds the runs; leave out --runs"),
        (["--validate", "examples"], "holds no finished run that this calibration can predict; give a folder of runs"),
        (["--strategy", "placed"], "steps of placed cannot be predicted; choose ddp, local, async_server"),
        (["--strategy", "async_server", "--collective", "ring"], "leave out --collective"),
        (["--strategy", "async_server", "--trigger", "sync"], "--trigger sync waits for all ranks"),
        (["--strategy", "async_server:root=2"], "root=2 is none of the 2 ranks"),
        (["--strategy", "async_server:mode=asp,staleness=2"], "staleness=2 has a meaning only with mode=ssp"),
        (["--strategy", "async_server", "--sweep", "bandwidth=1mbit..1gbit"], "leave out --strategy async_server"),
        ([*PLAIN, "--strategy", "async_server", "--steps-from", "none.csv"], "leave out --strategy"),
        (["--steps-from", "none.csv"], "--steps-from needs a single compressor; name it with --compressor"),
        (
            ["--sweep", "bandwidth=1mbit..1gbit", "--collective", "ring"],
            "name a --compressor, or leave out --collective",
        ),
        (["--straggler", "rank=2,slowdown=3"], "--straggler rank=2,slowdown=3 names none of the 2 ranks"),
        (["--straggler", "rank=1"], "write rank=1,slowdown=3"),
        (["--sweep", "bandwidth=1mbit..1gbit,world_size=2..8", "--straggler", "rank=1,slowdown=3"], "--straggler"),
        (
            ["--model", "resnet20"],
            "was measured with model small_cnn, not with resnet20; run `bench",
        ),
        (["--dataset", "synthetic"], "--model small_cnn --dataset synthetic --batch-size 32 --out other.json`"),
        (["--batch-size", "64"], "was measured with batch_size 32, not with 64"),
        (["--model", "resnet20", "--step-time", "9ms"], "leave out --calibration"),
        (["--step-time", "soon"], "'soon' is not a duration"),
        (["--classes", "100"], "--classes is for a rough estimate with --step-time"),
        (["--losses", "every=6h"], "--losses every=6h is not possible; write every=6h,restart=30s,checkpoint=100"),
        (["--losses", "every=6h,restart=soon,checkpoint=9"], "'soon' is not a duration"),
        (["--losses", "every=0s,restart=1s,checkpoint=9"], "give a mean time above 0 after every="),
        ([*PLAIN, "--losses", "every=1s,restart=1h,checkpoint=9"], "are hardly ever reached"),
        ([*LOSSES, "--sweep", "bandwidth=1mbit..1gbit"], "--losses needs a single prediction; leave out --sweep"),
        ([*PLAIN, *LOSSES, "--strategy", "async_server"], "leave out --strategy"),
        (LOSSES, "--losses needs a single compressor; name it with --compressor"),
    ],
)
def test_what_cannot_be_predicted_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    answer = invoke("predict", "--calibration", written(tmp_path), *arguments)
    assert (answer.code, sentence in answer.error) == (2, True), answer.error
    assert "\n" not in answer.error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "measure a model with `bench calibrate --out calibration.json`, or give --parameters 124M"),
        (
            ["--model", "vgg11"],
            "with `bench calibrate --model vgg11 --out calibration.json`, or give --model vgg11",
        ),
        (["--step-time", "9ms"], "--step-time needs the shapes of a model; name it with --model"),
        (["--step-time", "9ms", "--model", "linear", "--shared-cores", "2"], "slow each other down on --shared-cores"),
        (["--step-time", "9ms", "--model", "linear", "--compressor", "auto"], "auto works through DDP's own hook"),
    ],
)
def test_without_a_calibration_one_sentence_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = invoke("predict", *arguments)
    assert (answer.code, sentence in answer.error) == (2, True), answer.error


def test_the_time_of_a_step_is_enough_for_a_rough_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["predict", "--model", "small_cnn", "--step-time", "20ms", "--hosts", "4", "--bandwidth", "10mbit"]
    shown = invoke(*asked, "--compressor", "topk:ratio=0.001")
    assert shown.code == 0, shown.error
    assert "Rough estimate from the shapes of small_cnn, a step of 20 ms and typical costs of encoding" in shown.out
    assert "Not yet checked against real runs on this machine: this is a rough estimate" in shown.out
    told = json.loads(invoke(*asked, "--compressor", "bf16", "--batch-size", "8", "--json").out)
    assert told["samples_per_s"] == pytest.approx(4 * 8 / told["step_time_s"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "make one with bench calibrate --out"),
        ("{", "is not a calibration"),
        ("[]", f"is not a calibration of version {VERSION}"),
        ('{"version": 99}', f"is not a calibration of version {VERSION}"),
        (f'{{"version": {VERSION}}}', "cpu: Field required"),
    ],
)
def test_what_is_no_calibration_is_one_sentence(tmp_path: Path, content: str | None, sentence: str) -> None:
    path = tmp_path / "parts.json"
    if content is not None:
        path.write_text(content)
    answer = invoke("predict", "--calibration", str(path))
    assert (answer.code, sentence in answer.error) == (2, True), answer.error
    assert "\n" not in answer.error


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "cuda"], "GPUs cannot be calibrated"),
        (["--optimizer", "kfac"], "kfac exchanges data itself"),
        (["--compressors", "torch_bf16"], "torch_bf16 works through DDP's own hook"),
        (["--compressors", "nothing"], "there is no compressor 'nothing'"),
        (["--budget", "soon"], "'soon' is not a duration"),
    ],
)
def test_what_cannot_be_calibrated_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    answer = invoke("calibrate", "--out", str(tmp_path / "parts.json"), *arguments)
    assert (answer.code, sentence in answer.error) == (2, True), answer.error


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    ("base", "other", "sentence"),
    [
        ('model = "resnet20"', {}, "model is resnet20, but was calibrated with small_cnn"),
        ("accumulate = 2", {}, "--accumulate 2 cannot be predicted"),
        ("", {"cpu": "another"}, "the calibration is of another machine"),
    ],
)
def test_what_cannot_be_validated_is_one_sentence(
    tmp_path: Path, base: str, other: dict[str, str], sentence: str
) -> None:
    file = tmp_path / "cells.toml"
    file.write_text(
        f"[base]\nsteps = 2\nthreads = 1\nbucket_mb = 1.0\n{base}\n[matrix]\ncompressor = ['none', 'topk']\n"
    )
    answer = invoke(
        "predict",
        "--calibration",
        written(tmp_path, **other),
        "--validate",
        str(file),
        "--runs",
        str(tmp_path / "runs"),
    )
    assert (answer.code, sentence in answer.error) == (2, True), answer.error
    assert not (tmp_path / "runs").exists()


def test_predicted_and_measured_stand_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "cells.toml"
    file.write_text(
        "[base]\nsteps = 4\nwarmup_steps = 1\nthreads = 1\nbucket_mb = 1.0\ntrain_size = 300\ntest_size = 20\n"
        "[matrix]\ncompressor = ['none']\ncollective = ['ring']\n"
    )
    path, runs = written(tmp_path), tmp_path / "runs"
    answer = execute("predict", "--calibration", path, "--validate", str(file), "--runs", str(runs), "--json")
    assert answer.code == 0, answer.error
    (cell,) = json.loads(answer.out)["cells"]
    assert cell["error"] == cell["predicted_step_time_s"] / cell["step_time_s"] - 1
    assert cell["runs"] == 1
    for part in ("exposed_s", "cpu_s_per_step", "messages_per_step"):
        assert cell[part] > 0
        assert f"predicted_{part}" in cell
    (known,) = json.loads(Path(path).read_text())["validated"]
    assert known["measured_s"] == cell["step_time_s"]
    assert (runs / "validation.csv").exists()
    assert calibration().validated == ()
    _held_against_finished_runs(tmp_path, runs, cell)


def _held_against_finished_runs(tmp_path: Path, runs: Path, cell: dict[str, object]) -> None:
    """Compare with the runs alone, with another calibration; unknown runs are omitted and counted."""
    (run,) = runs.glob("*-s*")
    others = {"failed": "status.json", "of-another-model": "config.json", "of-another-machine": "metrics.csv"}
    changes = {"failed": ('"ok"', '"failed"'), "of-another-model": ('"small_cnn"', '"resnet20"')}
    for name, file in others.items():
        path = shutil.copytree(run, runs / "deeper" / name) / file
        was, becomes = changes.get(name, (" cores)", "0 cores)"))
        path.write_text(path.read_text().replace(was, becomes))
    fresh = tmp_path / "again"
    fresh.mkdir()
    path, table = written(fresh), fresh / "table.csv"
    answer = invoke("predict", "--calibration", path, "--validate", str(runs), "--table", str(table), "--json")
    assert answer.code == 0, answer.error
    (again,) = json.loads(answer.out)["cells"]
    assert {name: value for name, value in again.items() if name != "settings"} == {
        name: value for name, value in cell.items() if name != "settings"
    }
    assert again["settings"] == "compressor = none, collective = ring"
    assert "3 of 4 runs are left out: " in answer.error
    for reason in ("failed (1)", "model is resnet20, but was calibrated with small_cnn (1)", "made with cpu "):
        assert reason in answer.error
    assert len(json.loads(Path(path).read_text())["validated"]) == 1
    assert table.exists()
    none = invoke("predict", "--calibration", path, "--validate", str(runs / "deeper"))
    assert (none.code, "holds no finished run that this calibration can predict: " in none.error) == (2, True)


@pytest.mark.long
def test_a_run_that_failed_is_said_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "cells.toml"
    file.write_text(
        "[base]\nsteps = 60\nwarmup_steps = 1\nthreads = 1\nbucket_mb = 1.0\ntrain_size = 300\ntest_size = 20\n"
        "lr = 1e12\n[matrix]\ncompressor = ['none']\ncollective = ['ring']\n"
    )
    runs = tmp_path / "runs"
    asked = ["predict", "--calibration", written(tmp_path), "--validate", str(file), "--runs", str(runs)]
    nowhere = execute(*asked, "--table", str(tmp_path / "nowhere" / "x.csv"))
    assert (nowhere.code, "nowhere/x.csv" in nowhere.error, runs.exists()) == (2, True, False), nowhere.error
    answer = execute(*asked)
    assert answer.code == 3
    assert "1 of 1 runs failed" in answer.error
    assert f"remove their folders from {runs}" in answer.error
    assert "failed" in answer.out
    assert (runs / "validation.csv").exists()
