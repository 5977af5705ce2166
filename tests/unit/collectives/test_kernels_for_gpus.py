"""The kernels that are used on GPUs, and the reasons for the choice."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

import pytest

from bench.core import environment
from collectives.kernels import library


@pytest.fixture(autouse=True)
def _looked_for_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    library.triton_missing.cache_clear()
    yield
    library.triton_missing.cache_clear()


def test_triton_serves_on_gpus_and_native_loops_or_the_reference_path_on_cpus() -> None:
    assert library.triton_missing() == ""
    assert environment.kernels("cuda") == "triton"
    assert environment.kernels("cpu") == ("native" if library.library() else "reference")
    assert library.kernels_in_use("mps") == "reference"


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        (importlib.util, "find_spec", "Triton is not installed; it is part of PyTorch's default build for GPUs"),
        (shutil, "which", "Triton needs gcc or clang, and neither was found"),
    ],
)
def test_the_reference_path_serves_on_gpus_where_triton_cannot(
    module: object, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    assert library.triton_missing() == reason
    assert environment.kernels("cuda") == "reference"


def test_one_variable_turns_loops_and_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "reference")
    assert library.triton_missing() == f"{library.VARIABLE}=reference"
    assert environment.kernels("cuda") == "reference"
