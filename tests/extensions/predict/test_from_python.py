"""`bench.predict` gives the numbers of `bench predict --json`, and raises what the command prints."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable

import pytest

import bench
from tests.testing.invoke import commands, invoke

JOB = {
    "model": "resnet20",
    "step_time": "50ms",
    "hosts": 4,
    "bandwidth": "10mbit",
    "latency": "5ms",
    "compressor": "topk",
}


@pytest.mark.parametrize("further", [{}, {"sweep": "bandwidth=1mbit..9mbit"}])
def test_predict_gives_the_numbers_of_the_command(further: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    job = {name: value for name, value in JOB.items() if name != "bandwidth" or "sweep" not in further} | further
    found = bench.predict(**job)
    assert capsys.readouterr().out == ""
    words = [word for name, value in job.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert found.data == json.loads(invoke("predict", *words, "--json").out)
    listed = found.data.get("curve", [found.data])
    assert found.rows["step_time_s"].tolist() == [row["step_time_s"] for row in listed]
    assert "step_time_s" in repr(found)
    assert repr(found).endswith(found.notes[-1])
    assert "<table" in found._repr_html_()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: bench.predict(host=2), "bench.predict has no option 'host' (did you mean 'hosts'?); its options are"),
        (lambda: bench.predict(calibration="no.json"), "the calibration no.json cannot be read"),
        (lambda: bench.predict(hosts=0), "--hosts 0 is not possible: give 1 or more"),
        (lambda: bench.predict(**JOB | {"compressor": "tpok"}), "there is no compressor 'tpok' (did you mean 'topk'?)"),
        (lambda: bench.profile("no.py"), "there is no script no.py; give the path of a Python file"),
        (lambda: bench.profile("no.py", world_size=1), "Invalid value for '--world-size'"),
    ],
)
def test_errors_are_raised_as_one_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(bench.UsageError) as caught:
        call()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["predict", "profile"])
def test_help_and_completion_show_every_option_of_the_command(name: str) -> None:
    shown = inspect.signature(getattr(bench, name)).parameters
    declared = {each.opts[0].removeprefix("--").replace("-", "_"): each.default for each in commands()[name].params}
    assert {key: each.default for key, each in shown.items() if key not in ("script", "arguments")} == {
        key: default for key, default in declared.items() if key not in ("script", "arguments", "json")
    }
