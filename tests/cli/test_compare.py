from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.cli.compare import EXAMPLES, compare
from bench.core.errors import BenchError, NothingToCompare, Regression, UsageError
from bench.core.rows import RowWriter
from tests.testing.fake_rows import fake_row, fake_seeds, topk_seeds, write_run, write_runs
from tests.testing.invoke import Answer

DENSE = fake_seeds([1204.0, 1190.0, 1221.0], [0.978, 0.981, 0.975])
TOPK = topk_seeds([1577.0, 1544.0, 1610.0], [0.974, 0.980, 0.969])

app = typer.Typer(rich_markup_mode="rich")
app.command(epilog=EXAMPLES)(compare)


def bench_compare(*arguments: object) -> Answer:
    """Run `bench compare` and return its output; an error of the project is raised instead of printed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write_runs(tmp_path / "runs", [*DENSE, *TOPK])


def test_the_table_goes_to_stdout_and_warnings_to_stderr(runs: Path) -> None:
    write_run(runs / "dirty", fake_row(compressor="int8", git_dirty=True))
    answer = bench_compare(runs)
    assert answer.code == 0
    assert "topk:ratio=0.01 + allgather    3/3       1577  1.31x [1.25, 1.37]" in answer.out
    assert "warning" not in answer.out
    assert "warning: int8: run from a checkout with uncommitted changes" in answer.error


def test_results_runs_is_the_default(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = runs.parent / "somewhere"
    place.mkdir()
    monkeypatch.chdir(place)
    with pytest.raises(NothingToCompare, match="results/runs does not exist"):
        bench_compare()
    (place / "results").mkdir()
    runs.rename(place / "results" / "runs")
    assert "none" in bench_compare().out


def test_csv_holds_raw_numbers(runs: Path) -> None:
    dense, sparse = csv.DictReader(io.StringIO(bench_compare(runs, "--format", "csv").out))
    assert dense["verdict"] == "baseline"
    assert float(sparse["gain"]) == pytest.approx(1.3086, abs=1e-4)
    assert float(sparse["payload_bytes_per_step"]) == 20_000
    assert float(sparse["accuracy_difference"]) == pytest.approx(-0.0036667, abs=1e-6)


def test_json_is_one_document_with_its_warnings(runs: Path) -> None:
    write_run(runs / "odd", fake_row(compressor="int8", replicas_in_sync=False))
    document = json.loads(bench_compare(runs, "--json").out)
    assert document["baseline"] == "none + native"
    assert document["metric"] == "samples_per_s"
    assert document["settings"]["dataset"] == "digits"
    assert [row["compressor"] for row in document["rows"]] == ["none", "int8", "topk:ratio=0.01"]
    assert any("different parameters" in sentence for sentence in document["warnings"])


def test_markdown_and_its_file(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    answer = bench_compare(runs, "--out", out)
    assert answer.out == ""
    assert f"wrote {out}" in answer.error
    assert out.read_text() == bench_compare(runs, "--format", "markdown").out
    assert "| topk:ratio=0.01 + allgather | 1577 | 1.31x [1.25, 1.37] | faster |" in out.read_text()


def test_files_have_the_columns_of_the_terminal(runs: Path) -> None:
    (named, *numbers) = re.findall(r"<th[^>]*>([^<]*)</th>", bench_compare(runs, "--format", "html").out)
    in_terminal = bench_compare(runs).out.partition("─")[0].splitlines()[-2:]
    assert named == ""
    assert set(" ".join(numbers).split()) == set(" ".join(in_terminal).split())
    raw, *_ = csv.DictReader(io.StringIO(bench_compare(runs, "--format", "csv").out))
    assert {"compressor", "collective", "num_seeds", "samples_per_s", "gain", "test_accuracy"} < raw.keys()
    assert "compression_ratio" not in raw


@pytest.mark.parametrize("form", ["rich", "markdown", "latex", "html"])
def test_columns_are_chosen_for_every_format(runs: Path, form: str) -> None:
    chosen = ("--only-columns", "verdict,payload_bytes_per_step,gain", "--format", form)
    text = re.sub(r"[{}]", "", bench_compare(runs, *chosen).out)
    row = next(line for line in text.splitlines() if re.match(r"\W*(<tr><td[^>]*>)?topk", line))
    assert re.findall(r"topk:ratio=0.01|allgather|faster|1577|20 kB|1.31x \[1.25, 1.37\]", row) == [
        "topk:ratio=0.01", "allgather", "faster", "20 kB", "1.31x [1.25, 1.37]"
    ]  # fmt: skip


def test_columns_that_cannot_be_chosen_are_refused(runs: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no column 'verdikt' \(did you mean 'verdict'\?\); choose"):
        bench_compare(runs, "--only-columns", "verdikt")
    with pytest.raises(UsageError, match="host holds no numbers"):
        bench_compare(runs, "--only-columns", "host")
    with pytest.raises(UsageError, match="--columns adds columns and --only-columns chooses all of them"):
        bench_compare(runs, "--only-columns", "gain", "--columns", "step")


def test_a_plain_file_has_no_colours(runs: Path, tmp_path: Path) -> None:
    bench_compare(runs, "--out", tmp_path / "table.txt")
    text = (tmp_path / "table.txt").read_text()
    assert "1.31x [1.25, 1.37]" in text
    assert "\x1b" not in text


def test_options_that_contradict_or_cannot_be_met(runs: Path) -> None:
    with pytest.raises(UsageError, match="contradict"):
        bench_compare(runs, "--json", "--format", "csv")
    with pytest.raises(UsageError, match=r"cannot write .*absent.*choose another --out"):
        bench_compare(runs, "--out", runs / "absent" / "x.md")
    with pytest.raises(UsageError, match="no row fits --baseline qsgd"):
        bench_compare(runs, "--baseline", "qsgd")
    with pytest.raises(UsageError, match="did you mean 'step_time_s'"):
        bench_compare(runs, "--metric", "steptime_s")
    with pytest.raises(UsageError, match="is not a limit for --fail-on"):
        bench_compare(runs, "--fail-on", "slow")
    assert bench_compare(runs, "--format", "xml").code == 2


def test_the_rows_the_columns_and_their_order_can_be_chosen(runs: Path) -> None:
    write_runs(
        runs / "more",
        fake_seeds([1.0, 2.0], dataset="synthetic", config_id="b", encode_s=0.004, forward_backward_s=0.02),
    )
    answer = bench_compare(runs, "--where", "dataset=synthetic", "--columns", "step", "--format", "csv")
    (row,) = csv.DictReader(io.StringIO(answer.out))
    assert (row["encode_s"], row["forward_backward_s"], row["num_seeds"]) == ("0.004", "0.02", "2")
    listed = csv.DictReader(io.StringIO(bench_compare(runs, "--sort", "samples_per_s", "--format", "csv").out))
    assert [row["compressor"] for row in listed] == ["none", "topk:ratio=0.01", "none"]
    with pytest.raises(UsageError, match="host holds no numbers"):
        bench_compare(runs, "--columns", "host")


def test_targets_are_what_the_verdict_is_about(runs: Path) -> None:
    timed = write_runs(runs.parent / "timed", [row | {"train_time_s": 10.0 + row["seed"]} for row in [*DENSE, *TOPK]])
    answer = bench_compare(timed, "--target", "0.9,best-1", "--columns", "all", "--format", "csv")
    dense, _ = csv.DictReader(io.StringIO(answer.out))
    assert (dense["num_reached_0.9"], dense["num_missed_0.9"]) == ("3", "0")
    assert dense["num_reached_0.968"] == "3"


def test_runs_too_short_to_be_timed_are_compared_by_accuracy(tmp_path: Path) -> None:
    rows = [row | {"samples_per_s": None} for row in [*DENSE, *TOPK]]
    answer = bench_compare(write_runs(tmp_path / "short", rows))
    assert answer.out.startswith("No verdict, too much noise: topk -0.4 points")


def test_the_terminal_has_the_answer_first_and_every_column_where_asked(runs: Path) -> None:
    usual = bench_compare(runs).out
    assert usual.startswith("Faster, accuracy unclear: topk 1.31x (-0.4 points)\n\nsamples/s: every row against none")
    assert "CI]" in usual
    assert "compression" not in usual
    assert "compression" in bench_compare(runs, "--columns", "all").out
    assert "forward and" not in usual
    answer = json.loads(bench_compare(runs, "--json").out)
    assert answer["verdict"] == ["Faster, accuracy unclear: topk 1.31x (-0.4 points)"]
    assert "\nFaster, accuracy unclear: topk" in bench_compare(runs, "--format", "markdown").out


def test_latex_is_written_with_its_signs_escaped(runs: Path, tmp_path: Path) -> None:
    bench_compare(runs, "--out", tmp_path / "table.tex")
    text = (tmp_path / "table.tex").read_text()
    assert r"topk:ratio=0.01 + allgather & 1577 & 1.31x {[}1.25, 1.37] & faster & 97.4 (-0.4) & 20 kB \\" in text
    assert r"\shortstack[r]{accuracy \% \\ (vs none)}" in text
    assert text.index(r"\caption{samples/s: every row") < text.index(r"\label{tab:samples-s}") < text.index(r"\toprule")
    assert r"\resizebox{\ifdim\width>\linewidth" in text


def test_other_machines_are_named_above_the_table(runs: Path) -> None:
    write_run(runs / "other", fake_row(compressor="int8", host="laptop"))
    answer = bench_compare(runs)
    assert answer.out.index("caution: the rows come from different machines") < answer.out.index("Faster")
    assert "different machines" in bench_compare(runs, "--format", "csv").error
    assert "different machines" in " ".join(json.loads(bench_compare(runs, "--json").out)["warnings"])
    assert "different machines" not in bench_compare(runs, "--allow-other-machine").out


def test_what_cannot_be_read_is_left_out_when_asked(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.csv").touch()
    given = [runs, tmp_path / "foreign.csv", tmp_path / "empty.csv", tmp_path / "absent"]
    with pytest.raises(UsageError, match=r"foreign\.csv is not a metrics file"):
        bench_compare(*given[:-1])
    with pytest.raises(NothingToCompare, match="absent does not exist"):
        bench_compare(*given)
    answer = bench_compare(*given, "--keep-going")
    assert answer.code == 0
    for name in ("foreign.csv", "empty.csv", "absent"):
        assert f"{name} " in answer.error
    assert "seeds=3 each" in answer.out


def test_runs_are_held_against_a_reference(runs: Path, tmp_path: Path) -> None:
    reference = tmp_path / "ci.csv"
    names = {"name": "ci"}
    changed = write_runs(tmp_path / "changed", fake_seeds([1.0, 2.0], **names, payload_bytes_per_step=1_020_000.0))
    RowWriter(reference).extend(fake_seeds([1204.0, 1190.0], **names))
    same = write_runs(tmp_path / "same", fake_seeds([5.0, 6.0], **names))
    assert bench_compare(same, "--reference", reference).code == 0
    with pytest.raises(Regression, match=r"ci seed 1: payload_bytes_per_step was 1000000\.0 and is 1020000\.0 \(\+2"):
        bench_compare(changed, "--reference", reference)
    with pytest.raises(NothingToCompare, match="demo seed 1 is not in the reference"):
        bench_compare(runs, "--reference", reference)


def test_what_where_leaves_out_is_held_against_no_reference(tmp_path: Path) -> None:
    reference, ours = tmp_path / "ci.csv", tmp_path / "ours.csv"
    RowWriter(reference).extend(fake_seeds([1204.0]))
    RowWriter(ours).extend([*fake_seeds([1204.0]), *fake_seeds([900.0], dataset="synthetic", name="other", run_id="b")])
    assert bench_compare(ours, "--reference", reference, "--where", "dataset=digits").code == 0
    with pytest.raises(NothingToCompare, match="is not in the reference"):
        bench_compare(ours, "--reference", reference)


REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "ci.csv"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (("payload_bytes_per_step", "activation_bytes_per_step"), r" was .*\(\+2\.0%\)"),
        (("test_bits_per_byte", "test_accuracy"), " was "),
    ],
    ids=["bytes", "quality"],
)
def test_the_committed_reference_notices_what_changes(tmp_path: Path, columns: tuple[str, ...], said: str) -> None:
    with REFERENCE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    gate = ("--metric", "test_accuracy", "--reference", REFERENCE)
    assert bench_compare(REFERENCE, *gate).code == 0
    for number, row in enumerate(rows):
        column = next(name for name in columns if float(row[name] or 0))  # a run sends gradients, or activations
        changed = [each | {column: repr(float(each[column]) * 1.02)} if each is row else each for each in rows]
        path = tmp_path / f"{number}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(changed)
        with pytest.raises(Regression, match=f"{row['name']} seed {row['seed']}: {column}{said}"):
            bench_compare(path, *gate)


def test_grouping_takes_commas_and_repeats(runs: Path) -> None:
    joined = bench_compare(runs, "--by", "compressor,collective", "--format", "csv").out
    assert joined == bench_compare(runs, "--by", "compressor", "--by", "collective", "--format", "csv").out
    assert len(joined.splitlines()) == 3


def test_a_crossed_gate_is_exit_code_5_after_the_table(runs: Path) -> None:
    result = CliRunner().invoke(app, [str(runs), "--baseline", "topk", "--fail-on", "slower:5%"])
    assert isinstance(result.exception, Regression)
    assert result.exception.exit_code == 5
    assert str(result.exception) == "topk:ratio=0.01 + allgather -> none + native: 0.76x crosses slower:5%"
    assert "slower" in result.stdout


def test_a_gate_that_holds_is_exit_code_0(runs: Path) -> None:
    assert bench_compare(runs, "--fail-on", "slower:5%,accuracy:-2", "--fail-on", "bytes:+1%").code == 0


def test_several_gates_may_follow_one_option(runs: Path) -> None:
    assert bench_compare(runs, "--fail-on", "slower:5%", "accuracy:-0.5", "bytes:+1%").code == 0
    with pytest.raises(Regression, match=r"crosses bytes:\+1%"):
        bench_compare(runs, "--baseline", "topk", "--fail-on", "accuracy:-5", "bytes:+1%")


def test_a_gate_within_the_noise_is_a_warning(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", [*fake_seeds([1000.0]), *topk_seeds([500.0])])
    answer = bench_compare(runs, "--fail-on", "slower:5%")
    assert answer.code == 0
    assert "0.50x is beyond slower:5%, but with these seeds that may be noise" in answer.error


def test_a_gate_with_nothing_measured_is_exit_code_4(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", [*DENSE, *topk_seeds([1.0, 2.0], status="failed")])
    with pytest.raises(NothingToCompare, match="cannot be judged"):
        bench_compare(runs, "--fail-on", "slower:5%")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, 4),
        ("", 4),
        ("run_id,config_id,seed,compressor,collective,status\n", 4),
        ("run_id,config_id,seed,compressor,collective,status\nr,c,1,no", 4),
        ("epoch,loss\n1,2\n", 2),
    ],
)
def test_bad_input_has_its_exit_code(tmp_path: Path, content: str | None, code: int) -> None:
    path = tmp_path / "given.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BenchError) as info:
        bench_compare(path)
    assert info.value.exit_code == code
    assert "given.csv" in str(info.value)


def test_a_cut_last_line_is_only_a_warning(runs: Path) -> None:
    path = next(runs.glob("topk*-1-*")) / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-40])
    answer = bench_compare(runs)
    assert answer.code == 0
    assert f"warning: {path} line 2 is skipped: it is cut" in answer.error
    assert "2/2" in answer.out


def test_help_shows_examples_and_panels() -> None:
    text = bench_compare("--help").out
    for expected in ("--fail-on slower:5%", "Gates", "Meaning", "Output", "--allow-other-machine"):
        assert expected in text


def test_help_needs_neither_torch_nor_pandas() -> None:
    program = (
        "import sys, typer\n"
        "from bench.cli.compare import compare\n"
        "app = typer.Typer(); app.command()(compare)\n"
        "try:\n    app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)


def test_comparing_needs_no_torch_and_no_data_frames(runs: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from bench.cli.compare import compare\n"
        "compare(paths=[Path(sys.argv[1])])\n"
        "heavy = {'torch', 'pandas', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(runs)], check=True, stdout=subprocess.PIPE)
