"""README.md says what is so: its table of defaults, its commands and its links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bench.cli.defaults_doc import document, table
from bench.core import registry
from bench.core.config.run import DEFAULT_EPOCHS, RunConfig
from bench.core.errors import BenchError, Interrupted, NothingToCompare, Regression, RunFailed, UsageError
from bench.launch.resolve import resolve
from tests.testing.invoke import invoke

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
OTHERS = ("sweep", "tune", "compare", "list", "data", "doctor", "place")


def commands(verb: str) -> list[str]:
    """Every `bench VERB ...` line of the README, comments cut off."""
    lines = (line.partition("  #")[0].partition(" # ")[0].strip() for line in TEXT.splitlines())
    return [line for line in lines if re.match(rf"bench {verb}\b", line)]


def test_the_table_of_defaults_is_that_of_the_program() -> None:
    assert document(TEXT) == TEXT, "run: python -m bench.cli.defaults_doc"


def test_the_table_names_every_default() -> None:
    rows = {row.split("|")[1].split(",")[0].strip(" `"): row for row in table().splitlines()}
    for option in RunConfig.options():
        if option.flag is None:
            continue
        row, value = rows[option.flag_name], option.default
        if value is not None and not isinstance(value, bool):
            assert f"| `{value:g}` |" in row if isinstance(value, float) else f"| `{value}` |" in row
    assert f"| {DEFAULT_EPOCHS} without --steps |" in rows["--epochs"]


def test_what_the_program_chooses_is_what_the_table_says() -> None:
    config = resolve(RunConfig())
    assert (config.collective, config.epochs, config.eval_every) == ("native", DEFAULT_EPOCHS, 1)
    assert resolve(RunConfig(compressor="topk")).collective == "allgather"
    assert resolve(RunConfig(compressor="group_topk:preset=patent")).collective == "ring"
    assert resolve(RunConfig(compressor="group_topk:preset=patent", collective="tree")).collective == "tree"
    assert resolve(RunConfig(steps=5)).eval_every == 0
    assert config.lr == registry.load("optimizers", "sgd").default_lr  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", [line for line in commands("run") if "--resume" not in line])  # which needs a run
def test_every_run_command_is_accepted(line: str, tmp_path: Path) -> None:
    answer = invoke(*shlex.split(line)[1:], "--dry-run", "--out", str(tmp_path / "out"))
    assert answer.code == 0, answer.error


@pytest.mark.parametrize("line", [line for verb in OTHERS for line in commands(verb)])
def test_every_other_command_knows_its_options(line: str) -> None:
    assert invoke(*shlex.split(line)[1:], "--help").code == 0


def test_the_readme_shows_commands_of_every_kind() -> None:
    assert all(commands(verb) for verb in ("run", *OTHERS))
    assert len(commands("run")) >= 5


@pytest.mark.parametrize("error", [UsageError, RunFailed, NothingToCompare, Regression, Interrupted])
def test_every_exit_code_is_explained(error: type[BenchError]) -> None:
    assert re.search(rf"^\| {error.exit_code} \|", TEXT, re.MULTILINE)


@pytest.mark.parametrize("document_name", ["README.md", "CONTRIBUTING.md", "DECISIONS.md", "CHANGELOG.md"])
def test_every_link_leads_somewhere(document_name: str) -> None:
    text = (ROOT / document_name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.parametrize("target", ["demo", "test", "setup"])
def test_every_make_target_that_is_named_exists(target: str) -> None:
    assert f"make {target}" in TEXT
    assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
