"""The package's public names, which are imported when they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import collectives
from collectives import payloads


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, collectives; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", collectives.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(collectives, name).__name__ == name


def test_every_kind_is_public() -> None:
    assert set(payloads.__all__) <= set(collectives.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = collectives.Nonsense
