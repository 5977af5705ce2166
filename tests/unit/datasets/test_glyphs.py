"""Glyphs: drawings of fonts, the split by family, random changes in whole numbers, the cache, and what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import matplotlib
import pytest
import torch

from bench.core import spec
from bench.core.errors import UsageError
from bench.datasets.fonts import Face, first_of_each_class, held_out_among
from bench.datasets.glyphs import Glyphs
from bench.datasets.warp import rotate_scale_shear_shift

NOWHERE = Path(__file__) / "nowhere"  # a file has no children
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
SMALL = "glyphs:classes=40"
# Prints the set, the identity of its file, and a hash of all samples and of a batch that is augmented.
HASHED = f"""
import hashlib, torch
from pathlib import Path
from bench.core import spec
from bench.datasets.glyphs import Glyphs
print("ready", flush=True)
input()
dataset = spec.build("datasets", "{SMALL}")
print(dataset, dataset.drawings.file.stat().st_ino)
parts = dataset.load(Path(), seed=1)
tensors = [each.contiguous() for part in parts for each in (part.inputs, part.targets)]
tensors.append(dataset.augment(parts[0].inputs[:9], torch.Generator().manual_seed(1)).contiguous())
print(hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest())
"""


def build(text: str) -> Glyphs:
    return cast(Glyphs, spec.build("datasets", text))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that is empty before the first test."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "gradwire"


def folder_of(tmp_path: Path, *names: str) -> Path:
    for name in names:
        shutil.copy(FONTS / f"{name}.ttf", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_processes_that_start_at_once_draw_once_and_load_the_same_whatever_their_threads(cache: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", HASHED],
            env=os.environ | {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for threads in ("1", "3")
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    printed = {process.communicate()[0] for process in started}
    assert [process.returncode for process in started] == [0, 0]
    assert len(printed) == 1  # a second drawing would be another file, or fail
    drawn = [file for file in cache.iterdir() if file.suffix != ".lock"]
    assert len(drawn) == 1
    again = build(SMALL)
    assert [file for file in cache.iterdir() if file.suffix != ".lock"] == drawn == [again.drawings.file]


def test_no_face_is_on_both_sides_and_each_class_is_in_every_face_once() -> None:
    dataset = build(SMALL)
    training, held_out = dataset.drawings.training, dataset.drawings.held_out
    styles = ("Bold", "Bold {}", "Book", "{}")
    assert sorted(training) == sorted(
        f"DejaVu {family} {style.format(slant)}"
        for family, slant in (("Sans", "Oblique"), ("Serif", "Italic"))
        for style in styles
    )
    assert sorted(held_out) == sorted(f"DejaVu Sans Mono {style.format('Oblique')}" for style in styles)
    for part, faces in zip(dataset.load(NOWHERE, seed=1), (training, held_out), strict=True):
        assert part.inputs.shape == (40 * len(faces), 3, 32, 32)
        assert part.inputs.dtype == torch.uint8
        assert part.targets.bincount().tolist() == [len(faces)] * 40
        for one_face in part.inputs.split(40):  # all drawn, and all differently
            assert len(one_face.flatten(1).unique(dim=0)) == 40
            assert one_face.flatten(1).any(1).all()


def test_fewer_classes_are_the_first_of_more_and_another_seed_chooses_others() -> None:
    few, more, others = (
        build(f"glyphs:{options}").load(NOWHERE, seed=1)[1]
        for options in ("classes=5", "classes=50", "classes=50,class_seed=2")
    )
    assert torch.equal(few.inputs, torch.cat([face[:5] for face in more.inputs.split(50)]))
    assert not torch.equal(more.inputs, others.inputs)


def test_normalisation_suits_the_training_images() -> None:
    dataset = build("glyphs")
    inputs = dataset.normalise(dataset.load(NOWHERE, seed=1)[0].inputs)
    assert float(inputs.mean()) == pytest.approx(0, abs=0.01)
    assert float(inputs.std()) == pytest.approx(1, abs=0.01)


def test_characters_that_any_face_draws_alike_are_one_class() -> None:
    upright = {"A": b"1", "B": b"1", "C": b"2", "D": b"3", "E": b"4", "F": b"5"}
    oblique = {"A": b"6", "B": b"7", "C": b"7", "D": b"8", "F": b"9"}  # without E
    assert first_of_each_class([upright, oblique]) == ["A", "D", "F"]


def face(family: str, style: str) -> Face:
    return Face(path=Path(family), family=family, style=style, characters=())


def test_an_oblique_is_held_out_with_its_upright() -> None:
    styles = ("Regular", "Italic", "Bold", "Bold Italic")
    families = [face(family, style) for family in "ABCDE" for style in styles]
    assert held_out_among(families) == {f"{family} {style}" for family in "BE" for style in styles}
    assert held_out_among(families[:4]) == {"A Bold", "A Bold Italic"}
    assert held_out_among([face("A", style) for style in ("Oblique", "Book", "Light", "Light Oblique")]) == {
        "A Light",
        "A Light Oblique",
    }


def test_random_changes_are_the_same_pixels_everywhere() -> None:
    pixels = torch.arange(6 * 2 * 24 * 24).view(6, 2, 24, 24)
    images = (pixels * pixels // 7 % 256).to(torch.uint8)
    changed = rotate_scale_shear_shift(images, torch.Generator().manual_seed(1))
    found = hashlib.sha256(changed.numpy().tobytes()).hexdigest()
    assert found == "6514fce18fdff936d99ada58b8f182c2aabf0ea916604f39ac36176f6fdf2695"


def test_random_changes_are_small_and_differ_between_images() -> None:
    size = 32
    square = torch.zeros(500, 1, size, size, dtype=torch.uint8)
    square[..., 10:22, 10:22] = 200
    generator = torch.Generator().manual_seed(1)
    changed = rotate_scale_shear_shift(square, generator).double() / 200
    assert len(changed.flatten(1).unique(dim=0)) == 500
    assert not torch.equal(changed, rotate_scale_shear_shift(square, generator).double() / 200)
    area = changed.sum((1, 2, 3)) / 12**2
    assert 0.9**2 - 0.02 < float(area.min()) < 0.85
    assert 1.18 < float(area.max()) < 1.1**2 + 0.02
    at = torch.arange(size) - (size - 1) / 2
    for axis in (2, 3):  # a shift of up to two pixels, which the other changes enlarge
        centre = (changed.sum(axis).squeeze(1) * at).sum(1) / changed.sum((1, 2, 3))
        assert 1.9 < float(centre.abs().max()) < 2.6
        assert abs(float(centre.mean())) < 0.15


def test_all_channels_are_changed_alike() -> None:
    dataset = build(SMALL)
    train, _ = dataset.load(NOWHERE, seed=1)
    changed = dataset.augment(train.inputs[:20], torch.Generator().manual_seed(3))
    assert not torch.equal(changed, train.inputs[:20])
    assert torch.equal(changed, changed[:, :1].expand(-1, 3, -1, -1))


def test_fonts_of_your_own(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "DejaVuSans", "DejaVuSans-Oblique", "DejaVuSerif")
    (tmp_path / "LICENSE").write_text("free")
    shutil.copy(folder / "DejaVuSerif.ttf", folder / "copy.otf")
    dataset = build(f"glyphs:classes=9,size=8,fonts={folder}")
    assert dataset.drawings.training == ["DejaVu Sans Book", "DejaVu Sans Oblique"]
    assert dataset.drawings.held_out == ["DejaVu Serif Book"]
    assert dataset.sizes() == (18, 9)
    (tmp_path / "lost.ttf").symlink_to("nowhere.ttf")
    assert dataset.warnings() == ["glyphs leaves out 1 behind a broken link (lost.ttf)"]
    assert f"hash={dataset.drawings.hash}" in str(dataset)
    (tmp_path / "DejaVuSerif.ttf").write_bytes(b"no font")
    with pytest.raises(UsageError, match=r"DejaVuSerif.ttf cannot be read as a font .*; repair or remove it$"):
        build(f"glyphs:fonts={folder}").resolve_sizes(None, None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("classes=1", "classes=1 is not possible: give 2 or more"),
        ("size=7", "size=7 is not possible: give 8 or more"),
        ("size=65", "size=65 is not possible: give 64 or less"),
        ("classes=5000", r"the fonts share 2\d+ characters .* classes=5000 is not possible; ask for fewer"),
        ("hash=0123456789ab", "instead of 0123456789ab, because the fonts .* leave out hash"),
        ("fonts=nowhere", r"no folder of fonts .*nowhere; give a folder .* as glyphs:fonts=FOLDER$"),
        ("fonts=EMPTY", "holds no fonts; give a folder of .ttf or .otf files"),
        ("fonts=SINGLE", "are of one family and weight, DejaVu Sans, so none can be held out; add"),
    ],
)
def test_what_is_impossible_is_refused_in_one_sentence(tmp_path: Path, options: str, sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "single").mkdir()
    folder_of(tmp_path / "single", "DejaVuSans", "DejaVuSans-Oblique")
    text = options.replace("EMPTY", str(tmp_path / "empty")).replace("SINGLE", str(tmp_path / "single"))
    with pytest.raises(UsageError, match=sentence) as refusal:
        build(f"glyphs:{text}").resolve_sizes(None, None)
    assert "\n" not in str(refusal.value)


def test_missing_fonts_are_a_state_of_the_set() -> None:
    dataset = build("glyphs:fonts=nowhere")
    assert not dataset.is_present(NOWHERE)
    assert dataset.sizes() == (0, 0)
    assert "no folder of fonts" in dataset.status(NOWHERE)


def test_damaged_drawings_are_found_before_they_are_trained_on(tmp_path: Path) -> None:
    drawings = build(SMALL).drawings
    content = drawings.file.read_bytes()
    for damaged in (content[:-5] + b"damag", content[:-5]):
        (tmp_path / "drawings").write_bytes(damaged)
        with pytest.raises(UsageError, match=r"drawings are damaged; delete this file"):
            dataclasses.replace(drawings, file=tmp_path / "drawings").pixels()
