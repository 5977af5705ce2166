"""The wheel: the packages in it, and the platforms in its name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from collectives.kernels import build
from tests.testing.invoke import REPOSITORY


@pytest.mark.long
def test_the_wheel_holds_four_packages_and_is_for_many_linuxes(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "-C", str(REPOSITORY), "ls-files"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in filter(lambda name: not name.startswith(("docs/", "results/", "tests/")), listed):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", "out", "."], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "out").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"bench", "compressors", "collectives", "gradwire"}
    assert f"-py3-none-manylinux_{build.GLIBC.replace('.', '_')}_" in wheel.name
    assert any(name.endswith(".so") for name in names)
    assert "bench/recipes/resnet20-cifar10.toml" in names
