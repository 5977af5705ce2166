"""Unusable third-party components: skipped with a warning, and refused in one sentence when named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.core import registry
from tests.testing import broken_plugins
from tests.testing.invoke import execute, invoke
from tests.testing.plugins import install_entry_points

PLAN = ("run", "--model", "linear", "--steps", "2", "--dry-run")


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    broken_plugins.install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield from _fresh_registry()


def _fresh_registry() -> Iterator[None]:
    for cached in (registry.entries, registry._added, registry.warn_once):
        cached.cache_clear()
    yield
    for cached in (registry.entries, registry._added, registry.warn_once):
        cached.cache_clear()


@pytest.mark.usefixtures("_installed")
def test_the_table_of_pairs_leaves_them_out_with_a_warning_each() -> None:
    answer = invoke("list", "pairs", "--json")
    assert answer.code == 0
    listed = {pair["compressor"] for pair in json.loads(answer.out)["pairs"]}
    assert "topk" in listed
    assert not listed & set(broken_plugins.REASONS)
    for name, (_, reason) in broken_plugins.REASONS.items():
        (warning,) = (line for line in answer.error.splitlines() if f"'{name}'" in line)
        assert warning.startswith(f"warning: left out: compressor '{name}' of broken 1.0 cannot be used (")
        assert reason in warning
    assert "collective 'c_abstract' of broken 1.0 cannot be used" in answer.error


@pytest.mark.parametrize(
    "command", [("list", "--long"), ("list", "compressors", "--long", "--json"), ("data", "list"), ("data", "--json")]
)
@pytest.mark.usefixtures("_installed")
def test_no_list_ends_at_them(command: tuple[str, ...]) -> None:
    answer = invoke(*command)
    assert answer.code == 0
    assert "cannot be used (" in answer.error


@pytest.mark.parametrize("name", broken_plugins.REASONS)
@pytest.mark.usefixtures("_installed")
def test_where_it_is_named_one_sentence_says_why(name: str) -> None:
    answer = invoke(*PLAN, "--compressor", name)
    assert answer.code == 2
    assert "\n" not in answer.error
    assert f"compressor '{name}' of broken 1.0 cannot be used" in answer.error
    assert broken_plugins.REASONS[name][1] in answer.error
    assert answer.error.endswith("; repair or uninstall that package")


@pytest.mark.usefixtures("_installed")
def test_what_an_option_of_theirs_refuses_is_the_users_to_mend() -> None:
    answer = invoke(*PLAN, "--compressor", "b_refusing")
    assert answer.code == 2
    assert answer.error.startswith("never right; `bench list compressors --long`")


@pytest.mark.parametrize("command", [("list",), ("list", "compressors"), (*PLAN, "--compressor", "fp16")])
@pytest.mark.usefixtures("_installed")
def test_a_clash_with_a_built_in_name_is_said_once(command: tuple[str, ...]) -> None:
    answer = invoke(*command)
    assert answer.code == 0
    sentence = "warning: compressor 'fp16' of broken 1.0 is left out: the built-in one has the same name"
    assert answer.error.count(sentence) == 1


@pytest.mark.parametrize("text", ["[bench.compressors]\ngarbage\n", "\udcff"])
def test_entry_points_that_cannot_be_read_are_said(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("_installed")
    install_entry_points(tmp_path, "garbled", {})
    (tmp_path / "garbled-1.0.dist-info/entry_points.txt").write_text(text, encoding="utf-8", errors="surrogateescape")
    answer = invoke("list", "--json")
    assert answer.code == 0
    assert answer.error.count("warning: the entry points of garbled cannot be read (") == 1
    assert "b_import" in answer.out


@pytest.mark.usefixtures("_installed")
def test_what_a_built_in_component_raises_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from compressors.floats import Fp16

    def fail(_self: Fp16) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Fp16, "__post_init__", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        invoke("list", "pairs")


def assert_runs(command: tuple[str, ...], folder: Path) -> None:
    """Fail unless a command runs in a folder where broken components are installed."""
    broken_plugins.install(folder)
    answer = execute(*command, cwd=folder, PYTHONPATH=str(folder))
    assert answer.code == 0, answer.error
    assert "Traceback" not in answer.error


@pytest.mark.parametrize(
    "command",
    [
        ("run", "--model", "linear", "--steps", "2"),
        pytest.param(("doctor", "--no-smoke"), marks=pytest.mark.long),
    ],
    ids=lambda command: command[0],
)
def test_jobs_that_do_not_name_them_run(command: tuple[str, ...], tmp_path: Path) -> None:
    assert_runs(command, tmp_path)
