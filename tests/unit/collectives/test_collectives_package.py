"""Imports of the package, and the registry of all payload kinds."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from collectives import payloads
from collectives.base import Collective
from collectives.options import Options
from collectives.payloads.base import Payload


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, collectives; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", payloads.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(payloads, name).__name__ == name


def test_every_kind_is_public() -> None:
    files = Path(payloads.__file__).parent.glob("*.py")
    modules = [
        importlib.import_module(f"collectives.payloads.{file.stem}") for file in files if file.stem != "__init__"
    ]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    kinds = {kind.__name__ for kind in found if issubclass(kind, Payload) and not inspect.isabstract(kind)}
    assert kinds <= set(payloads.__all__)


def test_an_author_meets_at_most_twelve_members() -> None:
    members = {name for name in vars(Collective) if not name.startswith("_")} - set(dir(Options))
    assert len(members - {"bind"}) <= 12  # which makes the class that `bound` names
