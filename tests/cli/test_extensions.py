"""Commands and pictures that other packages add by entry point, and messages about missing extensions."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from bench.cli.commands import ANSWER, BUILT_IN, LOOK_AFTER, MEASURE, MODEL, _docstring
from bench.core import registry
from tests.testing.invoke import REPOSITORY, Answer, commands, execute, invoke, without_waiting
from tests.testing.plugins import install_entry_points

PACKAGES = ("gradwire", "bench", "compressors", "collectives")
FIRST_PARTY = (*PACKAGES, "tests", "benchmarks")

SOURCE = '''
import json
from pathlib import Path
from typing import Annotated

import typer

from bench.cli.commands import ANSWER, Command
from bench.core.errors import UsageError
from bench.report.plots import style
from bench.report.plots.kinds import FileKind, PictureKind
from bench.report.plots.style import Picture


def greet(name: Annotated[str, typer.Option(help="Whom to greet.")] = "you") -> None:
    """Greet somebody."""
    if name == "nobody":
        raise UsageError("nobody cannot be greeted; name somebody")
    print(f"hello {name}")


def bare() -> None:
    """Do little."""


def _of_rows(results):
    figure, _ = style.new_figure()
    return Picture(figure=figure, alt=f"{len(results.rows)} rows")


def _of_file(path, methods):
    figure, (axes,) = style.new_figure()
    axes.set_title(json.loads(path.read_text())["greeting"])
    return Picture(figure=figure, alt="a greeting")


GREET = Command(function=greet, epilog="[bold]Examples[/bold]", panel=ANSWER)
ROWS = PictureKind(name="rows", shows="how many rows there are", reading="Count them.", function=_of_rows)
GREETING = FileKind(
    name="greeting", shows="a greeting", reading="Read it.", made_by="bench greet", keys=frozenset({"greeting"}),
    function=_of_file,
)
NONSENSE = 3
'''
POINTS = {
    "bench.commands": {
        "greet": "polite:GREET", "bare": "polite:bare", "absent": "nowhere:COMMAND", "nonsense": "polite:NONSENSE"
    },
    "bench.plots": {"rows": "polite:ROWS", "greeting": "polite:GREETING", "absent": "nowhere:KIND"},
}  # fmt: skip


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """Install the package, and return its PYTHONPATH."""
    (tmp_path / "polite.py").write_text(SOURCE, encoding="utf-8")
    install_entry_points(tmp_path, "polite", POINTS)
    return str(tmp_path)


def test_a_command_of_a_third_party_is_shown_and_called_like_one_of_ours(installed: str) -> None:
    shown = execute("--help", PYTHONPATH=installed)
    assert shown.code == 0
    panels = {title.strip(): text for title, _, text in (part.partition("─") for part in shown.out.split("╭─")[1:])}
    assert [panel for panel in panels if panel not in (MEASURE, MODEL)] == ["Options", ANSWER, LOOK_AFTER, "Extensions"]
    assert panels[ANSWER].lstrip("─╮\n│ ").startswith("decide ")
    assert "Greet somebody." in panels[ANSWER]
    assert "Do little." in panels["Extensions"]
    for name in ("absent", "nonsense"):
        assert shown.error.count(f"warning: left out: command '{name}' of polite 1.0") == 1
    assert execute("greet", "--name", "Ada", PYTHONPATH=installed).out == "hello Ada\n"
    refused = execute("greet", "--name", "nobody", PYTHONPATH=installed)
    assert (refused.code, refused.error) == (2, "bench: nobody cannot be greeted; name somebody\n")


def test_a_command_that_cannot_be_imported_names_its_package(installed: str) -> None:
    answer = execute("absent", PYTHONPATH=installed)
    assert answer.code == 2
    assert answer.error.startswith("bench: command 'absent' of polite 1.0 cannot be used (ModuleNotFoundError: ")
    assert "Did you mean 'greet'" in execute("greeet", PYTHONPATH=installed).error


def test_pictures_of_a_third_party_are_drawn(installed: str, tmp_path: Path) -> None:
    (tmp_path / "greeting.json").write_text('{"greeting": "hello"}', encoding="utf-8")
    answer = execute(
        "plot", "greeting", str(tmp_path / "greeting.json"), "--out", str(tmp_path / "a.svg"), PYTHONPATH=installed
    )
    assert answer.code == 0, answer.error
    assert "hello" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    shown = execute("plot", "--help", PYTHONPATH=installed)
    assert "rows: how many rows there are" in shown.out
    assert "warning: left out: plot 'absent' of polite 1.0" in shown.error


def dependants() -> dict[str, set[str]]:
    """Return each part that can be deleted, with all parts that must then be deleted, too, because they import it."""
    parts = [
        *(str(each.parent.relative_to(REPOSITORY)) for each in REPOSITORY.glob("bench/extensions/*/__init__.py")),
        *("compressors/auto", "compressors/kernels/triton"),
        *("collectives/payloads/codec/triton.py", "collectives/schedule/waves.py"),
    ]
    parts = [part for part in parts if (REPOSITORY / part).exists()]
    imported = {
        part: {
            other
            for names in imports_below(REPOSITORY / part).values()
            for name in names
            for other in parts
            if is_in(name, other)
        }
        for part in parts
    }
    found = {part: {part} for part in parts}
    for _ in parts:
        found = {part: {other for other in parts if imported[other] & gone} | gone for part, gone in found.items()}
    return found


def is_in(module: str, part: str) -> bool:
    name = part.removesuffix(".py").replace("/", ".")
    return module == name or module.startswith(f"{name}.")


@functools.cache
def imports_below(path: Path) -> dict[str, list[str]]:
    """Return what a file, or each file in a folder, imports from this repository, by the file's path within it."""
    return {
        str(file.relative_to(REPOSITORY)): [
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in FIRST_PARTY
            for alias in node.names
        ]
        for file in ([path] if path.suffix else path.rglob("*.py"))
    }


def folder_of_tests(part: str) -> str:
    return f"tests/extensions/{Path(part).name}"


def copy_without(parts: Iterable[str], copy: Path) -> Path:
    """Copy the program and its tests to this folder, without some parts and the tests of these; link the rest."""
    for each in REPOSITORY.iterdir():
        if each.name in FIRST_PARTY:
            shutil.copytree(each, copy / each.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif each.name != ".git":
            (copy / each.name).symlink_to(each)
    for part in parts:
        if part.endswith(".py"):
            (copy / part).unlink()
            continue
        shutil.rmtree(copy / part)
        shutil.rmtree(copy / folder_of_tests(part), ignore_errors=True)
    return copy


def run_copy(program: Path, *command: str, **settings: str) -> Answer:
    """Run a Python program in a copy."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(program), "COLUMNS": "200"} | settings,
        cwd=program,
        capture_output=True,
        text=True,
        check=False,
    )
    return Answer(done.returncode, done.stdout, without_waiting(done.stderr))


# The figures of all pages are recomputed by benchmarks, some of which are of extensions.
COLLECT = (
    *("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"),
    "--ignore=tests/unit/docs/test_figures.py",
)
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


@pytest.mark.parametrize("part", dependants())
def test_a_part_that_can_be_deleted_leaves_nothing_that_needs_it(part: str, tmp_path: Path) -> None:
    gone = dependants()[part]
    removed = tuple(path for other in gone for path in (other, folder_of_tests(other)))
    needed = {
        (file, name)
        for folder in (*PACKAGES, "tests")
        for file, names in imports_below(REPOSITORY / folder).items()
        for name in names
        if not file.startswith(removed) and file != "bench/__init__.py"  # which imports for type checkers only
    }
    assert not [each for each in needed for other in gone if is_in(each[1], other)]
    program = copy_without(gone, tmp_path)
    lint = run_copy(program, "-c", LINT_IMPORTS, "--no-logo", "--no-cache")
    assert lint.code == 0, lint.out
    shown = run_copy(program, "-m", "bench", "list")
    assert (shown.code, shown.error) == (0, "")
    assert "group_topk" in shown.out


@pytest.mark.long
@pytest.mark.parametrize("part", dependants())
def test_without_a_part_that_can_be_deleted_the_other_tests_are_found(part: str, tmp_path: Path) -> None:
    program = copy_without(dependants()[part], tmp_path)
    found = run_copy(program, *COLLECT)
    assert found.code == 0, found.out[-2000:]
    assert run_copy(program, "-m", "ruff", "check", "--select", "F,E9", *FIRST_PARTY).code == 0


@pytest.fixture(scope="module")
def without_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_without(dependants(), tmp_path_factory.mktemp("program"))


@pytest.mark.parametrize(("command", "extension"), [("predict", "predict"), ("calibrate", "predict"), ("tune", "tune")])
def test_a_command_whose_extension_was_removed_says_how_to_get_it(
    command: str, extension: str, without_all: Path
) -> None:
    answer = run_copy(without_all, "-m", "bench", command, "--help")
    assert answer.code == 2
    assert answer.error.startswith(
        f"bench: bench {command} comes with the extension bench.extensions.{extension}, which is missing here"
    )
    assert answer.error.count("\n") == 1


@pytest.mark.parametrize("call", ["predict(hosts=2)", "profile('train.py')"])
def test_a_function_whose_extension_was_removed_raises_what_the_command_says(call: str, without_all: Path) -> None:
    command = call.partition("(")[0]
    raised = run_copy(
        without_all, "-c", f"import bench\ntry:\n    bench.{call}\nexcept bench.UsageError as e:\n    print(e)"
    )
    assert f"bench: {raised.out}" == run_copy(without_all, "-m", "bench", command).error


def test_a_strategy_whose_extension_was_removed_says_how_to_get_it(without_all: Path) -> None:
    answer = run_copy(without_all, "-m", "bench", "run", "--strategy", "elastic:quorum=2")
    assert answer.code == 2
    assert answer.error.startswith("bench: strategy 'elastic' is an extension that is not installed here; install")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--help",), LOOK_AFTER),
        (("plot", "--help"), "accuracy-time"),
        (("list",), "group_topk"),
        (("run", "--dry-run", "--model", "linear", "--steps", "2"), "linear"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_everything_else_works_without_them(arguments: tuple[str, ...], shown: str, without_all: Path) -> None:
    answer = run_copy(without_all, "-m", "bench", *arguments)
    assert (answer.code, answer.error) == (0, "")
    assert shown in answer.out
    assert "predicted" not in answer.out


def test_all_parts_that_can_be_deleted_may_be_deleted_together(without_all: Path) -> None:
    found = run_copy(without_all, *COLLECT)
    assert found.code == 0, found.out[-2000:]


def test_an_installation_that_never_heard_of_an_extension_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "plugins", lambda _group: {})
    answer = invoke("place", "--help")
    assert answer.code == 2
    assert "install gradwire again to get it" in answer.error


def test_help_reads_the_descriptions_that_the_commands_have() -> None:
    real = commands()
    for name, (_, function) in BUILT_IN.items():
        read, shown = (text.partition("\n\n")[0] for text in (_docstring(name, function), real[name].help))
        assert read == shown
