"""Folders of images, written here with Pillow."""

import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from bench.core import spec
from bench.core.errors import UsageError

COLOURS = {"cat": (200, 10, 10), "dog": (10, 200, 10)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, count in (("train", 4), ("val", 2)):
        for name, colour in COLOURS.items():
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (40 + 10 * number, 30), colour)
                image.putpixel((number, 0), (255, 255, 255))
                image.save(tmp_path / part / name / f"{number}.png")
    return tmp_path


def test_classes_sizes_and_pixels_are_those_of_the_folder(folder: Path) -> None:
    dataset = spec.build("datasets", f"imagefolder:path={folder},size=14")
    assert (dataset.num_classes, dataset.sizes(), dataset.status(folder)) == (2, (8, 4), "ready")
    train, test = dataset.load(Path(), seed=1, train_size=4)
    assert train.targets.tolist() == [0, 0, 1, 1]
    batch = train.inputs[torch.tensor([3, 0])]
    assert (batch.shape, batch.dtype) == ((2, 3, 16, 16), torch.uint8)  # 14 * 256 / 224
    assert batch[:, :, 8, 8].tolist() == [list(COLOURS["dog"]), list(COLOURS["cat"])]
    assert dataset.normalise(batch).shape == (2, 3, 14, 14)
    assert len(test) == 4


def test_images_are_found_once_and_a_note_says_what_is_left_out(folder: Path) -> None:
    cats = folder / "train" / "cat"
    (cats / "loop").symlink_to(cats)
    (cats / "0-again.png").symlink_to(cats / "0.png")
    (cats / "._0.png").write_bytes(b"of another system")
    (cats / "notes.txt").write_text("no image")
    (folder / "train" / ".cache").mkdir()
    os.mkfifo(cats / "pipe.png")
    dataset = spec.build("datasets", f"imagefolder:path={folder}")
    assert (dataset.num_classes, dataset.sizes()) == (2, (8, 4))
    (note,) = dataset.warnings()
    assert note == (
        f"imagefolder leaves out 1 hidden ({cats}/._0.png), 2 known by another name ({cats}/0-again.png, {cats}/loop), "
        f"1 of another kind, such as pipes and sockets ({cats}/pipe.png), 1 outside the folders of classes "
        f"({folder}/train/.cache), 1 without the ending of an image ({cats}/notes.txt)"
    )


def test_training_cuts_out_random_squares_or_mirror_images(folder: Path) -> None:
    dataset = spec.build("datasets", f"imagefolder:path={folder},size=14")
    image = torch.arange(16 * 16, dtype=torch.uint8).view(1, 1, 16, 16).expand(64, 3, 16, 16)
    cut = dataset.augment(image, torch.Generator().manual_seed(1))
    corners = {tuple(part[0, 0, [0, 13]].tolist()) for part in cut}
    places = {(16 * top + left, 16 * top + left + 13) for top in range(3) for left in range(3)}
    assert corners <= places | {(b, a) for a, b in places}
    assert len(corners) > 9
    again = dataset.augment(image, torch.Generator().manual_seed(1))
    assert torch.equal(cut, again)


def test_a_folder_of_another_form_is_refused_in_one_sentence(folder: Path) -> None:
    (folder / "val" / "dog").rename(folder / "val" / "horse")
    for path, message in ((folder, "different classes, such as"), (folder / "train", "needs the folders")):
        with pytest.raises(UsageError, match=message):
            spec.build("datasets", f"imagefolder:path={path}").resolve_sizes(None, None)
    other = spec.build("datasets", f"imagefolder:path={folder}")
    assert "different classes" in other.status(folder)
    assert (other.is_present(folder), other.sizes(), other.num_classes) == (False, (0, 0), 0)  # `bench list` shows this
    broken = folder / "train" / "cat" / "0.png"
    broken.write_bytes(b"no image")
    (folder / "val" / "horse").rename(folder / "val" / "dog")
    train, _ = spec.build("datasets", f"imagefolder:path={folder},size=8").load(Path(), seed=1)
    with pytest.raises(UsageError, match=r"0\.png cannot be read as an image"):
        train.inputs[0:1]
