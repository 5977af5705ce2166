"""The copy of a text is made once, mapped by all processes, checked by its hash, and replaced when a file changes."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from bench.core.errors import UsageError
from bench.datasets.corpus import Corpus, Files, corpus_of
from bench.datasets.folders import find_files

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number}.txt").write_text("".join(f"{number}, {line}\n" for line in range(50)))
    return tmp_path / "text"


def copied(folder: Path) -> Corpus:
    corpus_of.cache_clear()
    corpus = corpus_of(Files(folder, "all", *find_files(folder)))
    corpus.check_content()
    return corpus


def copies() -> list[Path]:
    return sorted((Path(os.environ["XDG_CACHE_HOME"]) / "gradwire" / "texts").glob("*.text"))


def test_a_copy_is_used_again_until_a_file_changes(folder: Path) -> None:
    first = copied(folder)
    (path,) = copies()
    inode = path.stat().st_ino
    assert copied(folder) == first
    assert path.stat().st_ino == inode
    train, test = (b"".join((folder / n).read_bytes() for n in first.sizes if (n in first.held_out) == is_held_out)
                   for is_held_out in (False, True))  # fmt: skip
    assert first.content[: sum(first.nbytes)] == train + test
    (folder / "0.txt").write_text("changed")
    assert copied(folder).hash != first.hash
    assert copies() == [path]
    first.check_content()  # a process keeps the copy that it has mapped


def test_a_process_that_cannot_write_into_the_cache_has_its_own_copy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = copied(folder)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert copied(folder) == expected


def test_a_damaged_copy_is_refused_and_old_ones_are_deleted(folder: Path) -> None:
    copied(folder)
    (path,) = copies()
    with path.open("r+b") as file:
        file.write(b"#")
    with pytest.raises(UsageError, match="is damaged; delete this folder and start again"):
        copied(folder)
    old = path.with_name("old.text")
    old.touch()
    os.utime(old, (0, 0))
    (folder / "0.txt").write_text("changed")
    copied(folder)
    assert copies() == [path]


def test_a_file_that_disappears_while_it_is_copied_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(*_: object) -> set[str]:
        (folder / "7.txt").unlink()
        return set()

    monkeypatch.setattr("bench.datasets.corpus.held_out_among", remove)
    with pytest.raises(UsageError, match=r"7\.txt could be read before, but not now \(No such file"):
        copied(folder)


def test_the_split_is_the_same_in_every_process(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"{number % 20} {'words' * number}\n" * 20, encoding="utf-8")
    dataset = f"spec.build('datasets', 'text:path={tmp_path}')"
    code = f"from bench.core import spec\nprint({dataset}.hash, {dataset}.sizes())"
    told = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "XDG_CACHE_HOME": f"{os.environ['XDG_CACHE_HOME']}/{seed}"},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(told) == 1


def test_families_of_the_library_stay_on_one_side() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    names = list((library / "encodings").glob("cp*.py"))
    listing = tuple(sorted((f"encodings/{path.name}", path.stat().st_size, path.stat().st_mtime_ns) for path in names))
    others = tuple((f"{name}.py", 1, 1) for name in ("abc", "ast", "bdb", "csv"))
    held_out = corpus_of(Files(library, "some", tuple(sorted((*others, *listing))))).held_out
    assert len(held_out & {name for name, _, _ in listing}) in (0, len(listing))


def test_without_locks_the_copy_is_of_this_process_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert copied(folder).nbytes == copied(folder).nbytes
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.text"))
