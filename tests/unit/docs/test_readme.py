"""Claims of README.md and of the site's pages: their commands, outputs, tables and links."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import os
import re
import shlex
from pathlib import Path

import pytest

from bench.cli.reference_pages import options_page
from bench.core import registry
from bench.core.config.run import DEFAULT_EPOCHS, RunConfig
from bench.core.errors import BenchError, Interrupted, NothingToCompare, Regression, RunFailed, UsageError
from bench.launch.plan import plan
from tests.testing.invoke import invoke

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = (DOCS / "options.md").read_text(encoding="utf-8")
COMPARE = (DOCS / "compare.md").read_text(encoding="utf-8")
PAGES = sorted(DOCS.glob("**/*.md"))
DOCUMENTS = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")), *PAGES]

_FENCE = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_INSTALLED = importlib.metadata.entry_points(group="bench.commands").names
_OF_MISSING_EXTENSIONS = _INSTALLED - registry.plugins("commands").keys()
_OTHERS = [
    verb for verb in ("sweep", "tune", "compare", "plot", "report", "predict", "list", "data", "doctor", "place")
    if verb not in _OF_MISSING_EXTENSIONS
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that a page tells its reader to type.

    Attributes:
        page: the file of the page.
        line: `bench ...`, without its comment.
        output: the lines that the page shows as output, after a line with a `$`.
    """

    page: Path
    line: str
    output: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.name}: {self.line}"


def _read_commands() -> list[Command]:
    found = []
    for page in DOCUMENTS:
        for _, block in _FENCE.findall(page.read_text(encoding="utf-8")):
            # A command, and its output up to the next command.
            for part in re.split(r"^ *(?:\$ )?(?=bench [a-z])", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
                line, *output = part.splitlines()
                found.append(Command(page, re.split(r"  #| # ", line)[0].strip(), tuple(output)))
    return found


COMMANDS = _read_commands()


def commands(*verbs: str) -> list[Command]:
    """Return the commands of these kinds."""
    return [command for command in COMMANDS if command.line.split()[1] in verbs]


# The pages in docs/extend run components of their own: see test_extend.py.
_OURS = [
    command for command in commands("run")
    if command.page.parent != DOCS / "extend"
    and ("--compressor auto" not in command.line or "auto" in registry.entries("compressors"))
]  # fmt: skip
REFUSED = [command for command in _OURS if command.output[:1] and command.output[0].startswith("bench: ")]
RUNS = [command for command in _OURS if "--resume" not in command.line and command not in REFUSED]
SHOWN = [command for command in commands("compare") if "results/reference/" in command.line and any(command.output)]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130
    assert len(README.split()) <= 1000


def test_the_guides_are_short() -> None:
    guides = [page for folder in ("", "extend", "strategies") for page in (DOCS / folder).glob("*.md")]
    lists = {DOCS / f"{name}.md" for name in ("columns", "options", "measure-columns")}
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in guides if page not in lists) <= 30_000


def test_no_table_that_a_command_prints_stands_twice() -> None:
    fences = "\n".join(page.read_text(encoding="utf-8") for page in DOCUMENTS)
    printed = [
        line
        for block in re.findall(r"^```console\n(.*?)^```", fences, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    rows = [line for line in printed if re.search(r"\w {3,}\S.* {2,}\S", line)]
    assert len(rows) > 40
    assert [row for row, times in collections.Counter(rows).items() if times > 1] == []


def test_the_table_of_options_is_that_of_the_program() -> None:
    assert options_page(OPTIONS) == OPTIONS, "run: python -m bench.cli.reference_pages"


def test_the_table_names_every_default() -> None:
    rows = {
        row.split("|")[1].split(",")[0].strip(" `"): row
        for row in options_page(OPTIONS).splitlines()
        if row.startswith("| ")
    }
    for option in RunConfig.options():
        if option.flag is None:
            continue
        row, value = rows[option.flag_name], option.default
        if value is not None and not isinstance(value, bool):
            assert f"| `{value:g}` |" in row if isinstance(value, float) else f"| `{value}` |" in row
    assert f"| {DEFAULT_EPOCHS} without --steps |" in rows["--epochs"]


def test_what_the_program_chooses_is_what_the_table_says() -> None:
    config = plan(RunConfig())
    assert (config.collective, config.epochs, config.eval_every) == ("native", DEFAULT_EPOCHS, 1)
    assert plan(RunConfig(compressor="topk")).collective == "allgather"
    assert plan(RunConfig(compressor="group_topk:preset=patent")).collective == "ring"
    assert plan(RunConfig(compressor="group_topk:preset=patent", collective="tree")).collective == "tree"
    assert plan(RunConfig(steps=5)).eval_every == 0
    assert config.lr == registry.load("optimizers", "sgd").default_lr  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", RUNS, ids=str)
def test_every_run_command_is_accepted(command: Command, tmp_path: Path) -> None:
    answer = invoke(*shlex.split(command.line)[1:], "--dry-run", "--out", str(tmp_path / "out"))
    assert answer.code == 0, answer.error


@pytest.mark.parametrize("command", REFUSED, ids=str)
def test_every_refusal_is_as_shown(command: Command) -> None:
    answer = invoke(*shlex.split(command.line)[1:], "--dry-run")
    assert answer.code == UsageError.exit_code
    assert f"bench: {answer.error}" == " ".join(line.strip() for line in command.output if line.strip())


@pytest.mark.parametrize("command", commands(*_OTHERS), ids=str)
def test_every_other_command_knows_its_options(command: Command) -> None:
    assert invoke(*shlex.split(command.line)[1:], "--help").code == 0


@pytest.mark.parametrize("command", SHOWN, ids=str)
def test_what_is_shown_of_committed_rows_is_printed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    printed = {line.strip() for line in invoke(*shlex.split(command.line)[1:]).out.splitlines()}
    shown = {line.strip() for line in command.output} - {"", "..."}
    assert shown <= printed


def test_the_pages_show_commands_of_every_kind() -> None:
    assert all(commands(verb) for verb in _OTHERS)
    assert len(RUNS) >= 10
    assert REFUSED
    assert SHOWN


@pytest.mark.parametrize("error", [UsageError, RunFailed, NothingToCompare, Regression, Interrupted])
def test_every_exit_code_is_explained(error: type[BenchError]) -> None:
    assert re.search(rf"^\| {error.exit_code} \|", COMPARE, re.MULTILINE)


@pytest.mark.parametrize("document_path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document_path: Path) -> None:
    """Links of the site stay within it; `make docs` checks their anchors."""
    text = re.sub(r"`[^`\n]+`", "", _FENCE.sub("", document_path.read_text(encoding="utf-8")))
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith("https://"):
            file = Path(os.path.normpath(document_path.parent / target))  # symbolic links are not followed
            assert file.exists(), target
            assert document_path not in PAGES or file.is_relative_to(DOCS), target


@pytest.mark.parametrize("document_path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_that_is_named_exists(document_path: Path) -> None:
    targets = re.findall(r"^([\w-]+):.* ## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    text = document_path.read_text(encoding="utf-8")
    blocks = "\n".join(block for _, block in _FENCE.findall(text))
    named = re.findall(r"`make ([a-z-]+)", text) + re.findall(r"^ *(?:\$ )?make ([a-z-]+)", blocks, re.MULTILINE)
    assert set(named) <= set(targets)
