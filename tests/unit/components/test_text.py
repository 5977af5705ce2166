"""Texts: windows of bytes, the split by file, the hash, the yardsticks, and what is refused."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn import functional

from bench.core import spec
from bench.core.errors import UsageError
from bench.datasets.text import LanguageModelling, TextDataset

NOWHERE = Path(__file__) / "nowhere"  # a file has no children

pytestmark = pytest.mark.usefixtures("own_cache")


def build(text: str) -> TextDataset:
    return cast(TextDataset, spec.build("datasets", text))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve files whose bytes say from which file they are; one is in a folder of its own, one is not UTF-8."""
    text = tmp_path / "text"
    (text / "sub").mkdir(parents=True)
    for number in range(11):
        (text / f"{number}.txt").write_text(chr(65 + number) * 100)
    (text / "sub" / "last.md").write_text("Z" * 100)
    (text / "empty.txt").touch()
    (text / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (text / "zeros.bin").write_bytes(bytes(10))
    (text / "link.txt").symlink_to(text / "0.txt")
    return text


def test_windows_do_not_overlap_and_each_byte_but_the_first_is_predicted_once(tmp_path: Path) -> None:
    whole = bytes(range(32, 127)) * 11
    (tmp_path / "a.txt").write_bytes(whole)
    train, test = build(f"text:path={tmp_path},context=8").load(NOWHERE, seed=1)
    tenth = len(whole) // 10  # of one file, the last tenth is held out
    for part, text in ((train, whole[:-tenth]), (test, whole[-tenth:])):
        num_windows = (len(text) - 1) // 8
        assert part.inputs.shape == part.targets.shape == (num_windows, 8)
        assert bytes(part.inputs[:].flatten().tolist()) == text[: 8 * num_windows]
        assert bytes(part.targets.flatten().tolist()) == text[1 : 8 * num_windows + 1]


def test_no_file_is_both_held_out_and_trained_on(folder: Path) -> None:
    dataset = build(f"text:path={folder},context=8")
    parts = dataset.load(NOWHERE, seed=1)
    for part in parts:  # the text is held once
        assert isinstance(part.inputs, torch.Tensor)
        assert part.inputs.dtype == part.targets.dtype == torch.uint8
        assert part.inputs.untyped_storage().data_ptr() == part.targets.untyped_storage().data_ptr()
    train, test = (set(part.inputs[:].flatten().tolist()) for part in parts)
    assert not train & test
    assert len(train | test) == 12
    (note,) = dataset.warnings()
    assert note == (
        "text leaves out 1 empty (empty.txt), 1 known by another name (link.txt), "
        "2 without UTF-8 text (picture.png, zeros.bin)"
    )


def test_links_are_followed_once_and_a_note_says_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, elsewhere = tmp_path / "text", tmp_path / "elsewhere"
    for folder in (text / "own", text / "locked", text / ".git", text / "results" / "runs", elsewhere / "deep"):
        folder.mkdir(parents=True)
        (folder / "file.txt").write_text(str(folder) * 20)
    (text / "20261126T000000-run-s1-0123456789").mkdir()  # of a run
    (text / os.fsdecode(b"\xff.txt")).write_text("a name that is not UTF-8")
    for name, target in {
        "file": elsewhere / "deep" / "file.txt", "folder": elsewhere, "loop": ".", "above": "..", "gone": "nowhere",
        "round": "round", "z": "own", "elsewhere": "folder",
    }.items():  # fmt: skip
        (text / name).symlink_to(target)
    (elsewhere / "back").symlink_to(text)
    os.mkfifo(text / "pipe")
    os.link(text / "own" / "file.txt", text / "own" / "same.txt")
    scan = os.scandir

    def refuse(path: Path) -> Any:
        if Path(path).name == "locked":  # to root, every folder is readable
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    dataset = build(f"text:path={text}")
    assert tuple(dataset.corpus.sizes) == ("elsewhere/deep/file.txt", "own/file.txt", os.fsdecode(b"\xff.txt"))
    (note,) = (note for note in dataset.warnings() if "leaves out" in note)
    assert note == (
        "text leaves out 2 behind a broken link (gone, round), 1 hidden (.git), 7 known by another name (above, "
        "elsewhere/back, file, ...), 1 of another kind, such as pipes and sockets (pipe), 1 unreadable (locked), "
        "2 with results of bench (20261126T000000-run-s1-0123456789, results/runs)"
    )
    through_a_link = tmp_path / "link"
    through_a_link.symlink_to(text)
    assert build(f"text:path={through_a_link}").hash == dataset.hash


def test_results_of_commands_are_no_part_of_a_text(folder: Path) -> None:
    before = build(f"text:path={folder}").hash
    for name in (
        "study/study.json", "study/step-times/0123456789.json", "study/decision.csv", "study/decision.json",
        "study/decision.svg", "results/report.html", "results/plots/pareto.svg", "tune/tuned.toml", "study.json",
        "calibration.json", "profile.json", "sweep/20261126T000000-run-s1-0123456789/metrics.csv",
    ):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a result")
        assert build(f"text:path={folder}").hash == before, name
    (folder / "results" / "notes.txt").write_text("of the user's")
    assert build(f"text:path={folder}").hash != before


def test_the_library_is_its_source_without_tests() -> None:
    dataset = build("stdlib")
    names = list(dataset.corpus.sizes)
    assert dataset.corpus.folder == Path(sysconfig.get_path("stdlib"))
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") and not {"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    held_out = dataset.corpus.held_out
    train, test = dataset.load(NOWHERE, seed=1)
    assert (len(train), len(test)) == dataset.sizes()
    assert 0.04 < len(test) / (len(train) + len(test)) < 0.12
    read = b"".join((dataset.corpus.folder / name).read_bytes() for name in names if name in held_out)
    assert bytes(test.inputs[:].flatten().tolist()) == read[: test.inputs[:].numel()]


def test_the_hash_is_part_of_the_text_and_follows_names_and_contents(folder: Path) -> None:
    dataset = build(f"text:path={folder}")
    assert len(dataset.hash) == 12
    assert f"hash={dataset.hash}" in str(dataset)
    assert spec.full_text(build(spec.full_text(dataset))) == spec.full_text(dataset)
    first = folder / "0.txt"
    first.write_text("B" * 100)
    changed = build(f"text:path={folder}").hash
    first.rename(folder / "new.txt")
    assert len({dataset.hash, changed, build(f"text:path={folder}").hash}) == 3
    with pytest.raises(
        UsageError, match=rf"^the text in {folder} has the hash \w+ instead of {changed}, so it has cha"
    ):
        build(f"text:path={folder},hash={changed}")


def test_a_text_that_changes_after_it_was_found_is_not_loaded(folder: Path) -> None:
    dataset, first = build(f"text:path={folder},context=8"), folder / "0.txt"
    first.write_text("B" * 99)
    with pytest.raises(UsageError, match="so it has changed"):
        dataset.load(NOWHERE, seed=1)
    first.unlink()
    with pytest.raises(UsageError, match="so it has changed"):
        dataset.load(NOWHERE, seed=1)


def test_a_subset_is_spread_evenly_and_lies_inside_larger_ones(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"".join(b"%07d\n" % number for number in range(2000)))
    dataset = build(f"text:path={tmp_path},context=8")
    whole, _ = dataset.load(NOWHERE, seed=1)
    chosen = {}
    for size in (3, 50, 500):
        part, _ = dataset.load(NOWHERE, seed=1, train_size=size)
        chosen[size] = [int(bytes(window)) for window in part.inputs[:].tolist()]
        gaps = torch.tensor([0, *chosen[size], len(whole)]).diff()
        assert len(part) == size
        assert int(gaps.max()) < 2.7 * len(whole) / size
        assert torch.equal(part.targets[:, :-1], part.inputs[:, 1:])
    assert set(chosen[3]) < set(chosen[50]) < set(chosen[500])
    rest, held_out = whole.split(50)
    assert bytes(held_out.inputs[:].flatten().tolist()) == b"".join(b"%07d\n" % number for number in chosen[50])
    assert len(rest) + 50 == len(whole)


def test_yardsticks_are_those_of_the_held_out_text() -> None:
    folder = Path(sysconfig.get_path("stdlib")) / "json"
    dataset = build(f"text:path={folder}")
    held_out = dataset.corpus.held_out
    text = b"".join((folder / name).read_bytes() for name in sorted(held_out))
    sizes = {"gzip": len(gzip.compress(text, 9)), "bz2": len(bz2.compress(text, 9)), "xz": len(lzma.compress(text))}
    expected = {f"{name}_bits_per_byte": 8 * size / len(text) for name, size in sizes.items()}
    assert dataset.yardsticks() == pytest.approx(expected)


def test_the_loss_is_the_mean_over_all_bytes() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 5, 256, generator=generator, dtype=torch.float64)
    targets = torch.randint(256, (3, 5), generator=generator, dtype=torch.uint8)
    right = logits.argmax(2)
    targets[0] = right[0]
    each = [-functional.log_softmax(logits[i, j], 0)[int(targets[i, j])] for i in range(3) for j in range(5)]
    task = LanguageModelling()
    torch.testing.assert_close(task.loss(logits, targets), torch.stack(each).mean())
    total, correct = task.sum_loss_and_correct(logits, targets)
    torch.testing.assert_close(total, torch.stack(each).sum())
    assert int(correct) == int((right == targets).sum()) >= 5
    wrong = "instead of 2 x context x 256 logits"
    assert task.output_error(torch.zeros(2, 7, 256), 2, 256) == ""
    assert task.output_error(torch.zeros(2, 256), 2, 256) == f"returns 2x256 for 2 samples {wrong}"
    assert task.output_error(torch.zeros(2, 7, 255), 2, 256) == f"returns 2x7x255 for 2 samples {wrong}"
    assert task.output_error((1, 2), 2, 256) == "returns tuple instead of a tensor of logits"


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ("a file", "", r"gone is not a folder; give a folder of text files with text:path=FOLDER$"),
        (None, "", r"there is no folder .*gone; give a folder of text files with text:path=FOLDER$"),
        ({}, "", r".*gone has no file of UTF-8 text; give another --dataset or folder$"),
        ({"a.bin": b"\xff"}, "", r"has no file of UTF-8 text, and it leaves out 1 without UTF-8 text \(a\.bin\); give"),
        (
            {"a.txt": b"x" * 999},
            "",
            "the held-out text of .* has 99 bytes, which are not enough for a window of contex",
        ),
        ({"a.txt": b"x" * 999}, ",context=4", "context=4 is not possible"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(
    files: dict[str, bytes] | str | None, options: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "gone"
    if isinstance(files, str):
        path.write_text(files)
    elif files is not None:
        path.mkdir()
        for name, content in files.items():
            (path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        build(f"text:path={path}{options}").resolve_sizes(None, None)
    if not options:
        assert build(f"text:path={path}").is_present(NOWHERE) == (files is not None and "a.txt" in files)


def test_sizes_and_hash_are_known_without_torch() -> None:
    code = (
        "from bench.core import spec\nfrom bench.launch.without_torch import without_torch\n"
        "print(without_torch(lambda: (lambda d: (d.hash, d.resolve_sizes(None, 5)))(spec.build('datasets', 'stdlib'))))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    dataset = build("stdlib")
    assert told == f"{(dataset.hash, dataset.resolve_sizes(None, 5))}\n"
