"""`bench collectives` and `bench compressors` complete, refuse and start jobs without importing torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_startup import assert_refused_where_torch_is_broken, assert_refused_without_torch, bench


def test_completion_imports_nothing_heavy() -> None:
    words = "bench collectives --collectives native,halv"
    out, loaded = bench(_BENCH_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD="3")
    assert out.split() == ["native,halving_doubling"]
    assert loaded == set()


def test_what_numbers_alone_show_is_refused_without_torch() -> None:
    assert_refused_without_torch({
        "collectives --overlap 2": "--overlap 2.0 is not possible",
        "compressors --repeats 0": "--repeats 0 is not possible",
    })  # fmt: skip


def test_a_wrong_component_is_refused_without_torch(tmp_path: Path) -> None:
    assert_refused_where_torch_is_broken({
        "compressors --compressors topk:ratio=2": "ratio=2 is not possible",
        "collectives --collectives native --compressors topk": "topk sends Sparse payloads",
    }, tmp_path)  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ("collectives", "--sizes", "4KiB", "--collectives", "ring", "--iters", "1", "--rounds", "1"),
        ("compressors", "--compressors", "topk", "--model", "linear", "--repeats", "1"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_job_is_launched_without_torch(arguments: tuple[str, ...]) -> None:
    out, loaded = bench(*arguments)
    assert out
    assert "torch" not in loaded
