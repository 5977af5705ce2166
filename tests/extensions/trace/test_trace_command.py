"""`bench trace`: the parts of steps, the table of exchanges, what is missing, and files that cannot be read."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.trace import traces
from tests.extensions.trace.traces import NEW, about, described, event, marks, step_events, write, write_job
from tests.testing.invoke import REPOSITORY, execute, invoke

OLD = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
UNDESCRIBED: dict[str, Any] = {"stream": 20}


def answer(*arguments: object) -> dict[str, Any]:
    shown = invoke("trace", *map(str, arguments), "--json")
    assert shown.code == 0, shown.error
    found: dict[str, Any] = json.loads(shown.out)
    for rank in found["ranks"]:  # whatever is not known
        for step in rank["steps"]:
            parts = [value for name, value in step.items() if name not in ("step", "step_s") and value is not None]
            assert sum(parts) == pytest.approx(step["step_s"], rel=0.01) or step["idle_s"] is None
    return found


def assert_parts(found: dict[str, Any]) -> None:
    for rank in found["ranks"]:
        for step in rank["steps"]:
            for name, milliseconds in traces.PARTS_MS[rank["rank"]].items():
                assert step[name] == pytest.approx(1e-3 * milliseconds, abs=1e-6), (rank["rank"], name)


@pytest.mark.parametrize(
    "kernel", [NEW, "ncclSymkDevKernel_AllReduce_AGxLL_R(ncclSymDevArgs)", "a_kernel_of_next_year"]
)
def test_parts_of_both_ranks_and_the_sums(kernel: str, tmp_path: Path) -> None:
    found = answer(write_job(tmp_path, kernel), "--bandwidth", "2gbit")
    assert_parts(found)
    assert found["bound_by"] == "compute_s"
    assert found["without_exchange_s"] == pytest.approx(0.085)  # of the slower rank
    assert found["late"] == [{"rank": 1, "wait_s": pytest.approx(0.015)}]
    assert found["notes"] == []
    (row,) = found["collectives"]
    assert (row["kind"], row["group"], row["dtype"], row["count"]) == ("all_reduce", "0 (2 ranks)", "bfloat16", 2)
    assert row["nbytes"] == 2 * 2 * traces.NUMEL
    assert row["bus_bps"] == pytest.approx(8 * row["nbytes"] / 0.035)  # 2 (n - 1) / n is 1 for two ranks
    assert row["share_of_bandwidth"] == pytest.approx(row["bus_bps"] / 2e9)


@pytest.mark.parametrize(
    "kernel",
    [
        OLD,
        "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
        "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
        "void rcclGenericKernel<1, false>(ncclDevComm*)",
        "void multimem_all_reduce_kernel<float>(float*)",
    ],
)
def test_kernels_that_describe_nothing_give_the_same_parts_and_a_sentence(kernel: str, tmp_path: Path) -> None:
    found = answer(write_job(tmp_path, kernel, UNDESCRIBED))
    assert_parts(found)
    assert all(row["bus_bps"] is None for row in found["collectives"])
    assert any("do not say their group, type and size" in note for note in found["notes"])
    assert any("named like exchanges" in note for note in found["notes"]) == ("multimem" in kernel)


def test_what_the_host_recorded_about_a_kernel_is_found(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = step_events(rank, 0, "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", UNDESCRIBED)
        for each in events:
            each["args"] |= {"External id": each["args"]["correlation"]} if each["cat"] == "cuda_runtime" else {}
        events += [event("record_param_comms", "cpu_op", 1, 2, **described() | {"External id": i}) for i in range(9)]
        write(tmp_path / f"rank{rank}.json", about(rank), marks(1) + events)
    found = answer(tmp_path)
    assert_parts(found)
    assert [(row["kind"], row["dtype"]) for row in found["collectives"]] == [("all_reduce", "bfloat16")]


def test_a_host_that_runs_ahead_does_not_move_the_steps(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = [each for step in (0, 100, 200) for each in step_events(rank, step, ahead_ms=90)]
        write(tmp_path / f"rank{rank}.json", about(rank), marks(3, ahead_ms=90) + events)
    found = answer(tmp_path)
    for rank in found["ranks"]:
        compute = traces.PARTS_MS[rank["rank"]]["compute_s"]
        assert [step["compute_s"] for step in rank["steps"]] == pytest.approx([1e-3 * compute] * 3)


def test_groups_are_matched_apart(tmp_path: Path) -> None:
    """Two pairs of ranks have groups with the same name; the pair of ranks 2 and 3 sums later."""
    for rank in range(4):
        ranks = f"[{rank // 2 * 2}, {rank // 2 * 2 + 1}]"
        delay = 20 * (rank // 2)
        events = step_events(rank % 2, delay, arguments=described(ranks=ranks, group="1"))
        write(tmp_path / f"rank{rank}.json", about(rank, 4), marks(1) + events)
    found = answer(tmp_path)
    for rank in found["ranks"][:2]:
        assert rank["steps"][0]["exposed_wait_s"] == pytest.approx(
            1e-3 * traces.PARTS_MS[rank["rank"]]["exposed_wait_s"]
        )
    assert {late["rank"] for late in found["late"]} == {1, 3}


def test_gloo_on_cpus(tmp_path: Path) -> None:
    """The times are from two hosts at 200 Mbit/s: two sums overlap, and rank 1 was late by 150 ms."""
    sums = {0: [(12.5, 410), (20.0, 491), (422.9, 250)], 1: [(175.6, 250), (192.2, 314), (425.3, 248)]}
    for rank, spans in sums.items():
        events = [event("ProfilerStep#3", "user_annotation", 0, 676)]
        events += [event("aten::mm", "cpu_op", 1, spans[0][0]), event("aten::empty", "cpu_op", 2, 3)]
        events += [event("c10d::allreduce_", "cpu_op", spans[0][0] - 1, spans[0][0] + 1)]
        events += [event("_c10d_functional::wait_tensor", "cpu_op", spans[0][0] + 2, 600)]
        events += [event("aten::copy_", "cpu_op", sum(spans[-1]), sum(spans[-1]) + 2, 8)]  # gloo copies what it got
        shape = {"Input Dims": [[975_000]], "Input type": ["float"]}
        for index, (start, lasts) in enumerate(spans):
            events.append(event("gloo:all_reduce", "user_annotation", start, start + lasts, 8 + index % 2, **shape))
        write(tmp_path / f"r{rank}.json", about(rank, backend="gloo"), events)
    found = answer(tmp_path)
    assert found["late"] == [{"rank": 1, "wait_s": pytest.approx(0.167, abs=0.001)}]
    first, second = (rank["steps"][0] for rank in found["ranks"])
    assert first["compute_s"] == pytest.approx(0.0125)
    assert second["compute_s"] == pytest.approx(0.1756)
    for each in (first, second):
        assert each["exposed_transfer_s"] == pytest.approx(0.494, abs=0.001)
    (row,) = found["collectives"]
    assert (row["count"], row["nbytes"], row["group"]) == (3, 3 * 3_900_000, "2 ranks")


def test_waits_inside_fsdp_and_encoding_of_gradwire_are_no_compute(tmp_path: Path) -> None:
    events = [
        event("ProfilerStep#1", "user_annotation", 0, 100),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 0, 60),
        event("FSDP::pre_backward (0)", "user_annotation", 10, 40),
        event("aten::copy_", "cpu_op", 35, 40),
        event("gradwire: encode", "user_annotation", 62, 70, 5),
        event("aten::topk", "cpu_op", 63, 66, 5),
        event("gradwire: exchange", "user_annotation", 66, 68, 5),  # as PowerSGD makes between its factors
        event("gradwire: send", "user_annotation", 70, 71, 5),
        event("gradwire: wait", "user_annotation", 71, 85, 5),
        event("gradwire: decode", "user_annotation", 85, 88, 5),
    ]
    found = answer(write(tmp_path / "t.json", about(0, 1, "gloo"), events))
    (step,) = found["ranks"][0]["steps"]
    assert (step["compute_s"], step["encoding_s"]) == (pytest.approx(0.035), pytest.approx(0.009))
    assert step["exposed_unsplit_s"] == pytest.approx(0.017)
    assert any("bytes of gradwire" in note for note in found["notes"])


def only_rank_0(folder: Path) -> Path:
    return write(folder / "a.json", about(0, 8), marks() + step_events(0, 0) + step_events(0, 100))


def no_shapes(folder: Path) -> Path:
    events = [event("aten::mm", "cpu_op", 0, 40), event("gloo:all_reduce", "user_annotation", 20, 90, 2)]
    return write(folder / "a.json", about(0, 2, "gloo"), marks(1) + events)


def no_exchange(folder: Path) -> Path:
    return write(folder / "a.json", about(0, backend="gloo"), [*marks(1), event("aten::mm", "cpu_op", 0, 40)])


def unknown_kernels(folder: Path) -> Path:
    events = [event("nccl:all_reduce", "user_annotation", 5, 6), event("k1", "kernel", 10, 60, 7)]
    return write(folder / "a.json", about(0), marks(1) + events)


def host_only(folder: Path) -> Path:
    events = [event("nccl:all_reduce", "user_annotation", 5, 6), event("aten::mm", "cpu_op", 10, 60)]
    return write(folder / "a.json", about(0), marks(1) + events)


def device_only(folder: Path) -> Path:
    events = [each for each in step_events(0, 0) if each["cat"] == "kernel"]
    return write(folder / "a.json", about(0), events)


def cut_off(folder: Path) -> Path:
    path = only_rank_0(folder)
    path.write_bytes(path.read_bytes()[:-900])
    return path


def cut_off_when_packed(folder: Path) -> Path:
    path = folder / "a.json.gz"
    path.write_bytes(gzip.compress(only_rank_0(folder).read_bytes())[:-40])
    return path


def unequal_counts(folder: Path) -> Path:
    write_job(folder)
    write(folder / "trace-rank-1.json", about(1), marks() + step_events(1, 0) + step_events(1, 100)[:-2])
    return folder


def bad_values(folder: Path) -> Path:
    events = [event("k", "kernel", 5, 6) | {"ts": bad} for bad in ("soon", None, [], True, float("nan"), 10**400)]
    events += [
        event("k", "kernel", 5, 6, correlation={}, stream=[]),
        event("cudaLaunch", "cuda_runtime", 5, 6, correlation=[]),
    ]
    events += [event("ncclKernel", "kernel", 5, 6, **{key: {"deep": [[[-1]]]} for key in described()})]
    events += [event("gloo:all_reduce", "cpu_op", 5, 6, **{"Input Dims": [[2**70, -1, True]], "Input type": [{}]})]
    return write(folder / "a.json", about(0, 1), [*marks(1), event("k", "kernel", 10, 60, 7), *events, {}, {"ph": "X"}])


def a_broken_rank(folder: Path) -> Path:
    write_job(folder)
    (folder / "trace-rank-1.json").write_text('{"schemaVersion": 1, "traceEvents": [', encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (only_rank_0, "only rank 0 of 8 is here"),
        (no_shapes, "record with record_shapes=True"),
        (no_exchange, "no exchange was recorded"),
        (unknown_kernels, "the host started 1 exchanges, but no kernel has a name of a known library"),
        (host_only, "without the accelerator"),
        (device_only, "the whole recording counts as one step"),
        (cut_off, "ends in the middle"),
        (cut_off_when_packed, "ends in the middle"),
        (unequal_counts, "rank 0 recorded 4 exchanges of 0 (2 ranks) and rank 1 3, of which 2 belong together"),
        (bad_values, "7 events have no valid time"),
        (a_broken_rank, "left out: "),
    ],
)
def test_what_is_missing_is_a_sentence_and_never_a_zero(make: Any, sentence: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    found = answer(path)
    assert sum(sentence in note for note in found["notes"]) == 1, found["notes"]
    if make is no_exchange:
        assert found["parts"]["exposed_transfer_s"] is None is found["parts"]["exposed_wait_s"]
        assert "is not known" in found["answer"]
    if make in (only_rank_0, cut_off, cut_off_when_packed, device_only):
        assert found["parts"]["exposed_wait_s"] is None
        # what was cut off had the last sum
        assert found["parts"]["exposed_unsplit_s"] == pytest.approx(0.015 if make is cut_off else 0.030)
    shown = invoke("trace", str(path))
    assert shown.code == 0
    assert f"note: {next(note for note in found['notes'] if sentence in note)}" in shown.error


def test_a_file_of_several_compressed_parts_is_read_to_its_end(tmp_path: Path) -> None:
    write_job(tmp_path)
    for path in list(tmp_path.glob("*.json")):
        content = path.read_bytes()
        parts = content[: len(content) // 2], content[len(content) // 2 :]
        path.with_suffix(".json.gz").write_bytes(b"".join(map(gzip.compress, parts)))
        path.unlink()
    found = answer(tmp_path)
    assert_parts(found)
    assert found["notes"] == []


def text(content: str) -> Any:
    def make(folder: Path) -> Path:
        (folder / "a.json").write_text(content, encoding="utf-8")
        return folder / "a.json"

    return make


def bomb(folder: Path) -> Path:
    with gzip.open(folder / "a.json.gz", "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [')
        for _ in range(32):
            file.write(b"{}," * (1 << 18))
    return folder / "a.json.gz"


def two_jobs(folder: Path) -> Path:
    (folder / "b").mkdir()
    write_job(folder)
    write_job(folder / "b")
    return folder


def two_sizes(folder: Path) -> Path:
    write_job(folder)
    return write(folder / "other.json", about(2, 4), marks() + step_events(0, 0)).parent


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (text("once upon a time"), "is not JSON"),
        (text("<!DOCTYPE html><html>sign in</html>"), "is a web page"),
        (text(""), "is empty"),
        (text('{"schema": "1.0.2-chakra.0.0.4", "nodes": [{"id": 1}]}'), "is an execution trace (Chakra)"),
        (text('{"traceEvents": []}'), "holds no events of a profiler"),
        (text("[" * 100_000), "holds no events of a profiler"),
        (
            text('{"traceEvents": [{"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 1, "dur": 2}]}'),
            "marks no steps",
        ),
        (bomb, "is larger than 10 MB unpacked"),
        (two_jobs, "are both of rank 0"),
        (two_sizes, "is of a job with 4 ranks and"),
        (lambda folder: folder, "there is no trace in"),
        (lambda folder: folder / "missing.json", "there is no "),
        (lambda folder: write_job(folder) / "trace-rank-0.json --step 3", "--step chooses the step to draw"),
        (lambda folder: f"{write_job(folder)} --picture {folder}/a.gif", "must end in .png, .svg, .pdf"),
        (lambda folder: f"{write_job(folder)} --picture {folder}/a.svg --step 9", "not every rank recorded step 9"),
        (lambda folder: f"{write_job(folder)} --bandwidth fast", "'fast' is not a bandwidth"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(make: Any, sentence: str, tmp_path: Path) -> None:
    shown = invoke("trace", *str(make(tmp_path)).split(), "--max-size", "10MB")
    assert shown.code == 2
    assert sentence in shown.error
    assert shown.error.count("\n") <= 1


def test_the_answer_for_people_and_the_picture(tmp_path: Path) -> None:
    hostile = "[red]<script>alert(1)</script>"
    folder = write_job(tmp_path, arguments=described(group=hostile))
    shown = invoke("trace", str(folder), "--bandwidth", "400gbit", "--picture", str(tmp_path / "step.svg"))
    assert shown.code == 0, shown.error
    assert shown.out.startswith(
        "a step takes 100 ms and is bound by computing (68% of it); if nothing were exchanged, it would take at least "
        "85 ms: 1.18x as fast at most\nrank 1 is late: each other rank waits 15 ms per step for it (15%)\n"
    )
    assert hostile[:20] in shown.out
    svg = (tmp_path / "step.svg").read_text(encoding="utf-8")
    assert "exposed wait for late ranks" in svg
    assert "rank 0, exposed transfer: 15 ms" in svg
    assert "<script" not in svg


@pytest.mark.slow
def test_bench_run_records_the_exchange_of_gradwire(tmp_path: Path) -> None:
    run = ("run", "--model", "linear", "--dataset", "synthetic", "--steps", "8", "--profile", "2", "--batch-size", "8")
    made = execute(*run, "--compressor", "topk", "--collective", "allgather", "--out", str(tmp_path))
    assert made.code == 0, made.error
    found = answer(tmp_path)
    assert [len(rank["steps"]) for rank in found["ranks"]] == [2, 2]
    assert [row["kind"] for row in found["collectives"]] == ["gradwire"]
    assert found["parts"]["encoding_s"] > 0
    (trace,) = tmp_path.glob("*/trace-rank-0.json")
    steps = [step["step"] for step in found["ranks"][0]["steps"]]
    assert {step["step"] for step in json.loads(trace.read_text())["bench_steps"]} >= {*steps}


@pytest.mark.long
def test_a_large_trace_needs_less_than_two_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    steps = [each for step in range(0, 40_000, 100) for each in step_events(0, step)]
    operators = [event("aten::convolution_of_a_model", "cpu_op", i / 20, i / 20 + 0.04, i % 3) for i in range(600_000)]
    write(path, about(0), marks(400) + steps + operators)
    assert path.stat().st_size > 1e8
    code = "from bench.cli.app import main; main()"
    subprocess.run(
        [sys.executable, "-c", code, "trace", str(path)], check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL
    )
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2_000_000
