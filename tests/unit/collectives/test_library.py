"""The selection of a trusted library of native loops."""

from __future__ import annotations

import shutil
from pathlib import Path

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


def test_where_the_best_cannot_be_used_the_next_one_is(tmp_path: Path) -> None:
    suitable = library.suitable_processors()
    for name in suitable:
        shutil.copy(build.HERE / build.library_name(name), tmp_path)
    best = tmp_path / build.library_name(suitable[-1])
    best.write_bytes(best.read_bytes()[:100])
    found = library.load(tmp_path)
    if suitable[1:]:
        assert found.finding == f"compiled for {suitable[-2]}"
    else:
        assert "cannot be loaded" in found.finding
    assert library.load(tmp_path / "empty").finding == "the library has not been built here"


def test_a_folder_in_which_nothing_can_be_written_is_a_reason_and_no_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")

    def compile_there(folder: Path) -> None:
        (folder / "library.so").write_bytes(b"")

    assert "Not a directory" in build.build_or_say_why(file / "kernels", compile_there)
