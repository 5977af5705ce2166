"""The project's own files agree with each other: dependencies and pins, targets and their callers."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROMISED = {
    "help",
    "setup",
    "demo",
    "demo-network",
    "check",
    "test",
    "exhaustive",
    "sanitize",
    "triton",
    "bench-ci",
    "bless",
    "coverage",
    "published",
    "published-quick",
    "attack",
    "resume-sweep",
} | {
    "lint",
    "format",
    "docs",
    "clean",
}
EXTENSIONS = ("bench.extensions", "compressors.auto", "tests.extensions")
PACKAGES = ("gradwire", "bench", "compressors", "collectives", "tests")


def pins() -> dict[str, str]:
    """Return the version of each package in constraints.txt, by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("text", REQUIREMENTS)
def test_every_dependency_is_pinned_within_its_range(text: str) -> None:
    requirement = Requirement(text)
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_who_develops_can_build_the_documentation() -> None:
    assert set(PROJECT["optional-dependencies"]["docs"]) <= set(PROJECT["optional-dependencies"]["dev"])


def test_every_promised_target_exists_and_explains_itself() -> None:
    explained = re.findall(r"^([\w-]+):.* ## \w", MAKEFILE, re.MULTILINE)
    assert set(explained) == PROMISED
    assert f".PHONY: {' '.join(explained)}\n" in MAKEFILE


def test_on_a_fresh_machine_each_of_the_two_commands_in_the_readme_sets_up_first(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```bash\n(make .*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert re.findall(r"^make (\S+) ", commands, re.MULTILINE) == ["demo", "test"]
    for file in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / file, tmp_path)
    for target, work in (("demo", "examples/demo.sh"), ("test", "pytest -q")):
        told = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert 0 < told.find("-m venv .venv") < told.find("-m pip install") < told.find(work)


def test_ci_makes_the_tests_the_figures_and_the_documentation(tmp_path: Path) -> None:
    for name, script in (("make", 'echo "$@"'), ("ip", "exit"), ("apt-get", "exit")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable}
    made = subprocess.run([ROOT / ".ci/run"], env=os.environ | path, capture_output=True, text=True, check=True).stdout
    assert made.split() == ["-j2", "test", "bench-ci", "docs", f"PYTHON={sys.executable}"]
    assert "- run: .ci/run\n" in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", [".ci/run", "examples/demo.sh"])
def test_scripts_can_be_run(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111
    assert (ROOT / script).read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")


def test_the_version_is_the_changelogs() -> None:
    assert f"] {PROJECT['version']}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def imported(file: Path) -> Iterator[str]:
    """Yield the full names of all modules, and of all names from modules, that a file imports when it runs."""
    package = file.relative_to(ROOT).parent.parts
    tree = ast.parse(file.read_text(encoding="utf-8"))
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    unused = {id(inner) for node in checks for part in node.body for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in unused:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            yield from (".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names)


def test_nothing_else_imports_an_extension() -> None:
    """Therefore the folders of extensions, and of their tests, can be removed."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    folders = [ROOT / extension.replace(".", "/") for extension in EXTENSIONS]
    others = [file for file in files if not any(file.is_relative_to(folder) for folder in folders)]
    assert len(others) > 300
    named = [file for file in others if re.search(r"\b(extensions|auto)\b", file.read_text(encoding="utf-8"))]
    dependent = {
        str(file.relative_to(ROOT)) for file in named for name in imported(file)
        if any(f"{name}.".startswith(f"{extension}.") for extension in EXTENSIONS)
    }  # fmt: skip
    assert not dependent


@pytest.mark.xdist_group("a group")
def test_tests_of_one_group_stay_together(request: pytest.FixtureRequest) -> None:
    """In parallel runs, the group is a part of the tests' names, by which they are distributed."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@a group")
