"""The functions of `bench` give what the commands give, raise what the commands print, and start quickly."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
import torch

import bench
from bench.api.comparing import CompareConfig
from bench.api.keywords import KEYWORDS, keywords_of
from bench.api.progress import LiveLine, warn
from bench.core import functions
from bench.core.config.configuration import Configuration
from bench.core.config.run import RunConfig
from bench.core.schema import METRICS
from bench.deciding.study import DecideConfig
from bench.launch.without_torch import outcomes_without_torch
from tests.testing.fake_rows import fake_seeds, topk_seeds, write_runs
from tests.testing.invoke import REPOSITORY, commands, invoke

if TYPE_CHECKING:
    from bench.api import run_options

TINY: run_options.RunOptions = {"model": "linear", "steps": 4, "train_size": 200, "test_size": 40, "threads": 1}
LONG: run_options.RunOptions = {**TINY, "steps": 1_000_000}
FLAGS = [part for name, value in TINY.items() for part in (f"--{name.replace('_', '-')}", str(value))]
REPEATING = [column.name for column in METRICS if column.deterministic]
HEAVY = {"torch", "pandas", "numpy", "scipy", "matplotlib"}


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python program that uses this checkout."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> bench.Runs:
    """Runs of two compressors."""
    out = tmp_path_factory.mktemp("runs")
    return bench.run(compressor=["none", "topk:ratio=0.1"], seeds=[3], out=out, quiet=True, **TINY)


def test_run_gives_the_numbers_of_the_command(runs: bench.Runs, tmp_path: Path) -> None:
    answer = invoke(
        "run", *FLAGS, "--compressor", "none,topk:ratio=0.1", "--seed", "3", "--out", str(tmp_path), "--json"
    )
    assert answer.code == 0, answer.error
    assert len(runs.folders) == len(json.loads(answer.out)) == 2
    assert list(runs.rows["status"]) == ["ok"] * 2
    of_command = bench.load(tmp_path)
    pd.testing.assert_frame_equal(
        runs.rows.sort_values(["compressor", "seed"], ignore_index=True)[REPEATING],
        of_command.sort_values(["compressor", "seed"], ignore_index=True)[REPEATING],
    )


def test_rows_have_typed_columns(runs: bench.Runs) -> None:
    rows = bench.load(runs.folders)
    pd.testing.assert_frame_equal(rows, runs.rows)
    assert list(rows.columns) == [column.name for column in METRICS]
    types = [str(rows[name].dtype) for name in ("seed", "test_accuracy", "augment", "compressor")]
    assert types == ["Int64", "float64", "boolean", "string"]
    assert rows["error"].isna().all()
    assert rows["digest"].str.len().eq(10).all()  # not read as a number


def test_compare_gives_the_rows_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_runs(
        tmp_path, [*fake_seeds([100, 110, 120]), *topk_seeds([200, 210, 220], [0.9, 0.91, 0.92], host="another")]
    )
    options = ["--where", "dataset=digits", "--columns", "step_time_p95_s", "--sort", "test_accuracy", "--json"]
    content = json.loads(invoke("compare", str(tmp_path), *options).out)
    capsys.readouterr()
    table = bench.compare(tmp_path, where={"dataset": "digits"}, columns="step_time_p95_s", sort="test_accuracy")
    assert json.loads(table.to_json(orient="records", double_precision=15)) == [
        {name: pytest.approx(value, rel=1e-12) if isinstance(value, float) else value for name, value in row.items()}
        for row in content["rows"]
    ]
    assert {name: table.attrs[name] for name in ("metric", "baseline", "verdict", "warnings")} == {
        name: content[name] for name in ("metric", "baseline", "verdict", "warnings")
    }
    assert table["verdict"].tolist() == ["baseline", "faster"]
    assert str(table["num_seeds"].dtype) == "Int64"
    printed = capsys.readouterr().err
    assert printed.count("warning: ") == len(table.attrs["warnings"]) > 0
    bench.compare([tmp_path], target=0.9, metric="samples_per_s", by=["compressor", "collective"], quiet=True)
    assert capsys.readouterr().err == ""


def test_pictures_and_the_report_are_files_that_a_notebook_shows(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs", [*fake_seeds([100, 110, 120]), *topk_seeds([200, 210, 220])])
    drawn = bench.plot("all", [tmp_path / "runs"], out=tmp_path / "plots", format="png")
    assert drawn.files == sorted((tmp_path / "plots").iterdir(), key=drawn.files.index) != []
    assert drawn._repr_html_().count('<img src="data:image/png;base64,') == len(drawn.files)
    written = bench.report(tmp_path / "runs", out=tmp_path / "page.html")
    printed = invoke("report", str(tmp_path / "runs"), "--out", str(tmp_path / "other.html"))
    assert f"{written}\n" == printed.out
    assert written.file.read_text() == (tmp_path / "other.html").read_text()
    assert "<iframe" in written._repr_html_()


@pytest.mark.parametrize("name", ["plot", "report"])
def test_keywords_have_the_names_and_defaults_of_the_command(name: str) -> None:
    shown = inspect.signature(getattr(bench, name)).parameters
    declared = {each.opts[0].removeprefix("--"): each.default for each in commands()[name].params}
    assert shown.keys() == declared.keys()
    assert {key: each.default for key, each in shown.items() if key not in ("kind", "paths")} == {
        key: default for key, default in declared.items() if key not in ("kind", "paths")
    }


@pytest.mark.slow
@pytest.mark.long  # `bench profile` alone takes half a minute, and has tests of its own
def test_the_example_of_the_page_on_the_api_runs(tmp_path: Path) -> None:
    pytest.importorskip("bench.extensions.predict")
    text = (REPOSITORY / "docs/api.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(import bench\n\nruns = \"results.*?)^```", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/reference").symlink_to(REPOSITORY / "results/reference")
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Will compressing gradients make the training of small_cnn on digits finish sooner")
    assert "topk" in done.stdout.rpartition("times_as_fast")[2]
    assert (tmp_path / "results/report.html").exists()
    assert (tmp_path / "curves.svg").exists()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: bench.run(epoch=3), "bench.run has no option 'epoch' (did you mean 'epochs'?)"),
        (lambda: bench.run(quite=True), "bench.run has no option 'quite' (did you mean 'quiet'?)"),
        (lambda: bench.run(batch_size=0), "--batch-size 0 is not possible"),
        (lambda: bench.run(recipe="resnet20"), "there is no recipe 'resnet20' (did you mean 'resnet20-cifar10'?)"),
        (lambda: bench.run(compressor="topk:ratoi=1"), "topk has no option 'ratoi'"),
        (lambda: bench.run(compressor=["topk", "topk"]), "names one compressor twice"),
        (lambda: bench.run(seed=1, seeds="1-2"), "--seed and --seeds contradict each other"),
        (lambda: bench.run(seeds=[]), "is not a list of seeds"),
        (lambda: bench.run(seeds=3), "seeds=3 is not possible: give a text such as '1-5', or a list"),  # type: ignore[arg-type]
        (lambda: bench.run(compressor=3), "compressor=3 is not possible: give a text such as"),  # type: ignore[arg-type]
        (lambda: bench.run(compressor={"topk": 1}), "compressor={'topk': 1} is not possible: give a text such as"),
        (lambda: bench.run(out=3), "out=3 is not possible: give the path of a folder"),  # type: ignore[arg-type]
        (lambda: bench.run(resume=3), "resume=3 is not possible: give the path of a folder"),  # type: ignore[arg-type]
        (lambda: bench.run(resume="x", world_size="two"), "--world-size two is not possible: give a whole number"),  # type: ignore[typeddict-item]
        (
            lambda: bench.run(resume="x", resume_residuals="add"),
            "use --resume-residuals sum or --resume-residuals drop",
        ),  # type: ignore[arg-type]
        (lambda: bench.run(resume="x", epochs=3, seeds=[1]), "configuration; leave out --epochs and --seeds"),
        (lambda: bench.run(resume="x"), "x is not a run folder"),
        (lambda: bench.run(resume_residuals="sum"), "(--resume and --world-size)"),
        (lambda: bench.plot("accuracy-tim"), "there is no picture 'accuracy-tim' (did you mean 'accuracy-time'?)"),
        (lambda: bench.report("nowhere"), "nowhere does not exist"),
        (lambda: bench.load("nowhere"), "nowhere does not exist"),
        (lambda: bench.compare("nowhere"), "nowhere does not exist"),
    ],
)
@pytest.mark.usefixtures("planned_here")
def test_errors_are_raised_as_one_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(bench.BenchError) as caught:
        call()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keyword", [keyword for keyword in KEYWORDS if keyword != "compressor"])
def test_an_option_of_another_type_is_refused_with_what_is_wanted(keyword: str) -> None:
    option = KEYWORDS[keyword]
    wrong: list[Any] = [[1], {"a": 1}, math.nan]
    wrong += [] if option.cell_type is bool else [True]
    wrong += [] if option.cell_type in (int, float) else [50, 5.5]
    for value in wrong:
        with pytest.raises(bench.UsageError) as caught:
            bench.run(**{keyword: value})
        given = value if isinstance(value, (int, float)) else functions.described(value)
        assert str(caught.value).startswith(f"{option.flag_name} {given} is not possible: give ")
        if option.value_type in (str, str | None):
            assert str(caught.value).endswith(f": give text in quotes ({option.meaning})")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"model": torch.nn.Sequential(torch.nn.Linear(2, 2))},
            "--model Sequential is not possible: give text in quotes (network to train: resnet18, or your own as "
            "net.py:build)",
        ),
        (
            {"dataset": lambda: None},
            "--dataset function is not possible: give text in quotes (data set to train on: digits, or your own as "
            "data.py:load)",
        ),
    ],
)
def test_an_object_in_place_of_a_name_is_told_how_to_give_ones_own(options: Any, sentence: str) -> None:
    with pytest.raises(bench.UsageError) as caught:
        bench.run(**options)
    assert str(caught.value) == sentence


def test_a_path_is_as_good_as_its_text(tmp_path: Path) -> None:
    with pytest.raises(bench.UsageError, match=r"the cluster file .*hosts\.toml cannot be read"):
        bench.run(cluster=tmp_path / "hosts.toml")


@pytest.mark.long
def test_a_run_that_fails_raises(tmp_path: Path) -> None:
    with pytest.raises(bench.RunFailed, match=r"try a lower --lr.*not run: --seeds 2"):
        bench.run(lr=1e12, optimizer="sgd:weight_decay=1", seeds=[1, 2], out=tmp_path, quiet=True, **TINY)
    assert list(bench.load(tmp_path)["status"])[-1] == "failed"


@pytest.mark.long
def test_progress_is_on_stderr_unless_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options: run_options.RunOptions = {**TINY, "steps": 1}
    bench.run(compressor="topk", out=tmp_path, **options)  # type: ignore[misc]
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "note: with --steps, the compressor has no warm-up" in printed.err
    assert "seed 1: starting" in printed.err
    bench.run(compressor="topk", out=tmp_path, quiet=True, **options)
    assert all(line.startswith("warning: ") for line in capfd.readouterr().err.splitlines())


def test_in_jupyter_progress_is_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with LiveLine("a run"):
        warn("a " * 200)
    assert capsys.readouterr().err == f"a run: starting\nwarning: {'a ' * 200}\n"


def in_a_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def in_a_running_loop(call: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return call()

    return asyncio.run(main())


@pytest.mark.long
@pytest.mark.parametrize("place", [in_a_thread, in_a_running_loop])
def test_a_thread_or_a_running_event_loop_may_call(
    place: Callable[[Callable[[], bench.Runs]], bench.Runs], runs: bench.Runs, tmp_path: Path
) -> None:
    found = place(lambda: bench.run(compressor="topk:ratio=0.1", seeds="3", out=tmp_path, quiet=True, **TINY))
    same = runs.rows[(runs.rows["compressor"] == found.rows["compressor"][0])]
    assert found.rows["test_accuracy"].tolist() == same["test_accuracy"].tolist()


def test_a_process_with_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    assert in_a_thread(lambda: outcomes_without_torch([lambda: 1])) == [None]


INTERRUPTED = """
import signal, sys, bench
try:
    bench.run(out=sys.argv[1], eval_every=20, **eval(sys.argv[2]))
except bench.Interrupted as error:
    print("raised:", error)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.long
def test_ctrl_c_raises_and_python_goes_on(tmp_path: Path) -> None:
    with python(INTERRUPTED, str(tmp_path), repr(LONG)) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("accuracy" in line for line in lines)  # wait for the first evaluation
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    assert process.returncode == 0
    assert out.startswith("raised: stopped by the user; the rows so far are kept in ")
    assert bench.load(tmp_path)["status"].iloc[-1] == "interrupted"


STARTED = f"""
import sys, bench
assert not {HEAVY} & set(sys.modules)
assert callable(bench.run) and callable(bench.compare) and callable(bench.decide)
assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)
assert [name for name in bench.__all__ if not hasattr(bench, name)] == []
assert not hasattr(bench, "jump")
"""


def test_the_functions_are_imported_without_torch_and_pandas() -> None:
    with python(STARTED) as process:
        _, error = process.communicate()
    assert process.returncode == 0, error


@pytest.mark.parametrize(
    ("function", "configurations"),
    [(bench.run, [RunConfig]), (bench.compare, [CompareConfig]), (bench.decide, [DecideConfig, RunConfig])],
)
def test_help_and_completion_show_every_option_that_the_command_has(
    function: Callable[..., object], configurations: list[type[Configuration]]
) -> None:
    shown = inspect.signature(function).parameters
    for keyword, option in (pair for each in configurations for pair in keywords_of(each).items()):
        assert shown[keyword].default == option.default or keyword == "compressor"  # of run, which may be several
