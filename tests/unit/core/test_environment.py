"""The environment of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.core import environment


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    environment.cpu_model.cache_clear()
    yield
    environment.cpu_model.cache_clear()


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        ({"avx2", "avx512f"}, "AMD EPYC with AVX-512"),
        ({"avx2"}, "AMD EPYC with AVX2"),
        ({"sse2"}, "AMD EPYC"),
        (set(), "AMD EPYC"),
    ],
)
def test_processors_of_one_name_are_told_apart_by_their_vectors(
    flags: set[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_name_of_cpu", lambda: "AMD EPYC")
    monkeypatch.setattr(environment, "cpu_flags", lambda: frozenset(flags))
    assert environment.cpu_model() == model
    assert environment.origin_columns()["cpu"] == f"{model} ({environment.usable_cores()} cores)"
