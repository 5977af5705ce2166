"""`bench collectives`: refusals, and real jobs whose sums are checked."""

from __future__ import annotations

import csv
import json
import signal
import time
from pathlib import Path

import pytest

from bench.extensions.microbenchmarks.columns import COLLECTIVES
from tests.testing.invoke import execute, invoke, processes_of, start
from tests.testing.plugins import install

REFUSALS = [
    (["--compressors", "topkk"], "there is no compressor 'topkk' (did you mean 'topk'?)"),
    (["--collectives", "rings"], "there is no collective 'rings' (did you mean 'ring'?)"),
    (["--compressors", "topk:ratio=2"], "ratio=2 is not possible"),
    (["--compressors", ","], "names no component"),
    (["--compressors", "none,topk", "--collectives", "native"], "topk sends Sparse payloads"),
    (["--compressors", "int8", "--collectives", "allgather,ring"], "ring adds payloads on their way"),
    (["--compressors", "none,topk", "--dtype", "int8"], "topk compresses floating-point tensors"),
    (["--collectives", "server:mode=asp"], "server has no option 'mode'"),
    (["--collectives", "server:downlink=recode"], "use downlink=dense or downlink=union"),
    (["--collectives", "server:error_feedback=true"], "use downlink=dense or downlink=union without error feedback"),
    (["--collectives", "server:root=2"], "root=2 is none of the 2 ranks"),
    (["--sizes", "1MB,huge"], "'huge' is not a size"),
    (["--sizes", "1MB:1kB"], "'1MB:1kB' is not a range of sizes"),
    (["--sizes", "3"], "3 bytes hold no fp32 element; give larger --sizes"),
    (["--out", "no/such/folder/sums.csv"], "choose another --out"),
]
QUICK = ("collectives", "--iters", "2", "--rounds", "2", "--warmup", "1", "--threads", "1", "--device", "cpu")


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(("arguments", "sentence"), REFUSALS, ids=[" ".join(a) for a, _ in REFUSALS])
def test_refusal(arguments: list[str], sentence: str) -> None:
    answer = invoke("collectives", "--device", "cpu", *arguments)
    assert answer.code == 2
    assert sentence in answer.error
    assert "\n" not in answer.error


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    "option", ["--world-size=1", "--iters=0", "--rounds=0", "--overlap=1.5", "--overlap=nan", "--dtype=fp8"]
)
def test_out_of_range(option: str) -> None:
    answer = invoke("collectives", option)
    assert answer.code == 2
    assert option.partition("=")[0] in answer.error


@pytest.mark.usefixtures("planned_here")
def test_a_file_with_other_columns_is_not_appended_to(tmp_path: Path) -> None:
    out = tmp_path / "metrics.csv"
    out.write_text("run_id,seed\na,1\n", encoding="utf-8")
    answer = invoke("collectives", "--out", str(out))
    assert answer.code == 2
    assert out.read_text(encoding="utf-8") == "run_id,seed\na,1\n"


def test_all_that_is_legal_is_summed_rightly(tmp_path: Path) -> None:
    out = tmp_path / "sums.csv"
    answer = execute(
        *QUICK, "--sizes", "12,40kB", "--compressors", "none,group_topk:ratio=0.05,value_dtype=fp32", "--overlap", "1",
        "--out", str(out),
    )  # fmt: skip
    assert answer.code == 0, answer.error
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [column.name for column in COLLECTIVES]
    assert {row["num_wrong"] for row in rows} == {"0"}
    dense = {row["collective"]: row for row in rows if (row["payload"], row["size_bytes"]) == ("none", "40000")}
    assert {"native", "ring", "halving_doubling", "tree", "allgather", "server", "hierarchical", "pool"} <= set(dense)
    assert (dense["ring"]["messages"], dense["ring"]["bytes_sent"]) == ("2.0", "40000.0")
    assert (dense["native"]["messages"], dense["native"]["bytes_sent"]) == ("", "40000.0")
    assert dense["ring"]["count"] == "10000"
    for row in rows:
        assert float(row["algbw_Bps"]) == pytest.approx(int(row["size_bytes"]) / float(row["time_p50_s"]))
        assert float(row["busbw_Bps"]) == pytest.approx(float(row["algbw_Bps"]))  # 2 (2 - 1) / 2
        assert 0 < float(row["time_p50_s"]) <= float(row["time_p95_s"])
    sparse = {row["collective"] for row in rows if row["payload"].startswith("group_topk")}
    assert "native" not in sparse
    assert {"ring", "allgather"} <= sparse
    assert " 1.000" in answer.out  # the index sets are equal on both ranks


@pytest.mark.long
def test_another_type_as_json_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    out = tmp_path / "sums.csv"
    command = (*QUICK, "--sizes", "4kB", "--world-size", "3", "--dtype", "bf16", "--out", str(out), "--json")
    answer = execute(*command, "--collectives", "native,ring", "--compressors", "none,sign")
    assert answer.code == 2  # none of the named collectives supports what sign sends
    answer = execute(*command, "--collectives", "native,allgather", "--compressors", "none,sign")
    assert answer.code == 0, answer.error
    assert "left out: sign sends" in answer.error
    rows = json.loads(answer.out)
    assert [(row["collective"], row["payload"]) for row in rows] == [
        ("native", "none"), ("allgather", "none"), ("allgather", "sign"),
    ]  # fmt: skip
    assert {(row["dtype"], row["count"], row["num_wrong"]) for row in rows} == {("bf16", 2000, 0)}
    assert rows[0]["speedup_to_native"] == 1
    assert rows[2]["bytes_to_allgather"] == 1
    execute(*command, "--collectives", "ring")
    assert len(out.read_text(encoding="utf-8").splitlines()) == 1 + 3 + 1  # appended under the same header


def test_a_wrong_sum_is_counted_and_fails(tmp_path: Path) -> None:
    answer = execute(*QUICK, "--sizes", "4kB", "--collectives", "native,losing", PYTHONPATH=install(tmp_path))
    assert answer.code == 3
    assert "losing got 2 elements of none at 4000 bytes wrong" in answer.error  # one in each of two rounds
    assert "losing" in answer.out


def test_a_failing_rank_is_named_and_the_rows_before_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "sums.csv"
    answer = execute(
        *QUICK, "--sizes", "400,40kB", "--collectives", "breaking", "--out", str(out), PYTHONPATH=install(tmp_path)
    )
    assert answer.code == 3
    assert "rank 1: ValueError: this collective is broken; logs are in " in answer.error
    assert "400 B" in answer.out
    assert len(out.read_text(encoding="utf-8").splitlines()) == 1 + 1


def test_an_interrupted_sweep_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "sums.csv"
    process = start(*QUICK, "--sizes", "400,4kB", "--iters", "500000", "--out", str(out), TMPDIR=str(tmp_path))
    while not list(tmp_path.glob("bench-collectives-*/logs/*/attempt_0/0")):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130
    assert "bench: stopped by the user; no row was finished, so none is kept\n" in error
    assert not list(tmp_path.glob("bench-collectives-*"))
    assert not processes_of(tmp_path)
