"""Which library of native loops is trusted."""

from __future__ import annotations

import pytest

from collectives.kernels import build, library
from tests.testing.loops import needs_loops

pytestmark = needs_loops


@pytest.mark.parametrize(("name", "value"), [("FLAGS", ("-O1",)), ("TARGETS", {**build.TARGETS, "other": ("x",)})])
def test_a_library_of_other_flags_or_targets_is_not_used(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.load(build.HERE).handle is not None
    monkeypatch.setattr(build, name, value)
    found = library.load(build.HERE)
    assert found.handle is None
    assert "other flags" in found.finding
