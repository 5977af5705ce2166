"""Data sets: sizes, types, splits, balanced subsets, and the constants for normalisation."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from pathlib import Path
from typing import cast
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

from bench.core import registry, spec
from bench.core.errors import UsageError
from bench.core.run_folder import RunFolder, write_json
from bench.datasets.base import Dataset, DatasetError, Samples
from bench.datasets.built_in import Digits, _axes, _two_colours
from bench.train.session import parts_of
from bench.train.worker import prepare
from tests.testing.configs import make_config

NOWHERE = Path(__file__) / "nowhere"  # a file has no children
BUILT_IN = ("digits", "synthetic")


def build(text: str) -> Dataset:
    return cast(Dataset, spec.build("datasets", text))


@pytest.fixture(scope="module")
def parts() -> dict[str, tuple[Samples, Samples]]:
    return {name: build(name).load(NOWHERE, seed=1) for name in BUILT_IN}


def test_all_sets_are_found_with_a_description() -> None:
    found = registry.entries("datasets")
    assert set(found) == {"cifar10", "cifar100", "digits", "imagefolder", "stdlib", "synthetic", "text"}
    assert all(len(entry.description) > 20 for entry in found.values())


@pytest.mark.parametrize("name", BUILT_IN)
def test_parts_have_the_promised_types_and_sizes(name: str, parts: dict[str, tuple[Samples, Samples]]) -> None:
    dataset = build(name)
    assert tuple(len(part) for part in parts[name]) == dataset.sizes()
    for part in parts[name]:
        assert part.inputs.dtype == torch.uint8
        assert part.inputs.shape == (len(part), 3, 32, 32)
        assert part.targets.dtype == torch.int64
        assert sorted(set(part.targets.tolist())) == list(range(dataset.num_classes))


@pytest.mark.parametrize("name", BUILT_IN)
def test_mean_and_deviation_are_those_of_the_training_part(
    name: str, parts: dict[str, tuple[Samples, Samples]]
) -> None:
    dataset = build(name)
    pixels = parts[name][0].inputs.double() / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(dataset.mean).double(), atol=2e-3, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(dataset.std).double(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_sets_need_no_preparation(name: str) -> None:
    dataset = build(name)
    dataset.prepare(NOWHERE)
    assert dataset.is_present(NOWHERE)
    assert dataset.status(NOWHERE) == "built in, nothing to prepare"
    assert not NOWHERE.exists()


def test_digits_are_the_same_where_their_file_lies_elsewhere(
    parts: dict[str, tuple[Samples, Samples]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for part, same in zip(parts["digits"], build("digits").load(NOWHERE, seed=1), strict=True):
        assert torch.equal(part.inputs, same.inputs)
        assert torch.equal(part.targets, same.targets)


def test_digits_are_the_real_ones_split_by_every_fourth_of_each_class(
    parts: dict[str, tuple[Samples, Samples]],
) -> None:
    source = load_digits()
    one_class_after_the_other = sorted(range(1797), key=lambda i: source.target[i])
    chosen = {"test": sorted(one_class_after_the_other[::4])}
    chosen["train"] = sorted(set(range(1797)) - set(chosen["test"]))
    # Row r of this matrix has the weights of 8 pixels in pixel r of 32.
    weights = np.stack([np.interp((np.arange(32) + 0.5) / 4 - 0.5, range(8), unit) for unit in np.eye(8)], axis=1)
    for part, indices in zip(parts["digits"], (chosen["train"], chosen["test"]), strict=True):
        assert part.targets.tolist() == source.target[indices].tolist()
        enlarged = torch.from_numpy(weights @ source.images[indices] @ weights.T * (255 / 16))
        assert (part.inputs[:, 0].double() - enlarged).abs().max() < 0.5001

    train, test = parts["digits"]
    share = test.targets.bincount() / (train.targets.bincount() + test.targets.bincount())
    assert ((share - 0.25).abs() < 0.005).all()


def test_digits_are_grey_and_use_the_whole_range(parts: dict[str, tuple[Samples, Samples]]) -> None:
    train, _ = parts["digits"]
    assert torch.equal(train.inputs[:, 0], train.inputs[:, 1])
    assert torch.equal(train.inputs[:, 0], train.inputs[:, 2])
    assert (int(train.inputs.min()), int(train.inputs.max())) == (0, 255)


def test_digits_do_not_depend_on_the_seed(parts: dict[str, tuple[Samples, Samples]]) -> None:
    again = build("digits").load(NOWHERE, seed=2)
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(again, parts["digits"], strict=True))


def unbalanced_part() -> Samples:
    labels = torch.tensor([0] * 60 + [2] * 30 + [1] * 10)[
        torch.randperm(100, generator=torch.Generator().manual_seed(4))
    ]
    images = torch.arange(100, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 32, 32)
    return Samples(inputs=images, targets=labels)


@pytest.mark.parametrize("size", range(1, 101))
def test_subset_keeps_the_shares_of_the_classes_and_the_order(size: int) -> None:
    part = unbalanced_part()
    subset = part.subset(size)
    assert len(subset) == size
    expected = torch.tensor([0.6, 0.1, 0.3]) * size
    assert ((subset.targets.bincount(minlength=3) - expected).abs() <= 1).all()
    numbers = subset.inputs[:, 0, 0, 0].long()
    assert (numbers.diff() > 0).all()
    assert torch.equal(part.targets[numbers], subset.targets)


def test_smaller_subsets_lie_inside_larger_ones() -> None:
    part = unbalanced_part()
    chosen = [set(part.subset(size).inputs[:, 0, 0, 0].tolist()) for size in range(1, 101)]
    assert all(smaller < larger for smaller, larger in itertools.pairwise(chosen))


def test_load_takes_balanced_subsets() -> None:
    train, test = build("digits").load(NOWHERE, seed=1, train_size=100, test_size=50)
    assert train.targets.bincount().tolist() == [10] * 10
    assert test.targets.bincount().tolist() == [5] * 10


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"train_size": 1348}, "digits has 1347 training samples, so 1348 are not possible; ask for 1 to 1347"),
        ({"test_size": 451}, "digits has 450 test samples, so 451 are not possible; ask for 1 to 450"),
        ({"train_size": 0}, "digits has 1347 training samples, so 0 are not possible"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        build("digits").load(NOWHERE, seed=1, **sizes)


def test_sizes_are_known_without_loading() -> None:
    assert build("cifar10").resolve_sizes(None, 100) == (50_000, 100)
    assert build("synthetic:train_size=30").resolve_sizes(None, 5_000_000) == (30, 5_000_000)
    with pytest.raises(UsageError, match="synthetic makes at least one test sample, so 0 are not possible"):
        build("synthetic").resolve_sizes(None, 0)


LARGE = "synthetic:size=64,classes=70"


@pytest.mark.parametrize("text", [LARGE, "synthetic:size=8,classes=1000", "synthetic:size=100,classes=3"])
def test_generated_images_have_the_size_and_classes_asked_for(text: str) -> None:
    dataset = build(text)
    train, test = dataset.load(NOWHERE, seed=1, train_size=2 * dataset.num_classes, test_size=5)
    assert train.inputs.shape == (len(train), 3, dataset.image_size, dataset.image_size)
    assert test.inputs.shape == (5, 3, dataset.image_size, dataset.image_size)
    for round_ in train.targets.split(dataset.num_classes):  # each class once
        assert sorted(round_.tolist()) == list(range(dataset.num_classes))


@pytest.mark.slow
@pytest.mark.parametrize("text", [LARGE, "synthetic:size=100,classes=7"])
def test_a_generated_image_does_not_depend_on_how_many_are_asked_for(text: str) -> None:
    many, _ = build(text).load(NOWHERE, seed=1, train_size=600, test_size=1)
    for size in (1, 60, 520):
        few, _ = build(text).load(NOWHERE, seed=1, train_size=size, test_size=1)
        assert torch.equal(few.inputs, many.inputs[:size])
        assert torch.equal(few.targets, many.targets[:size])


def test_mean_and_deviation_hold_for_other_sizes_and_numbers_of_classes() -> None:
    dataset = build(LARGE)
    pixels = dataset.load(NOWHERE, seed=1, train_size=700, test_size=1)[0].inputs.double() / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(dataset.mean).double(), atol=5e-3, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(dataset.std).double(), atol=1e-2, rtol=0)


def test_beyond_ten_a_class_is_told_by_the_axis_of_its_colours() -> None:
    axes = _axes(100)
    cosines = (axes @ axes.T).abs().fill_diagonal_(0)
    assert float(cosines.max()) < math.cos(math.radians(8))
    labels = torch.arange(1000)
    bright, dark = _two_colours(1000, axes[labels // 10], torch.Generator().manual_seed(1))
    along = functional.cosine_similarity((bright - dark).view(1000, 3), axes[labels // 10])
    torch.testing.assert_close(along, torch.ones(1000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("digits:size=3", "digits has no option 'size'"),
        ("synthetic:train_size=0", "train_size=0 is not possible"),
        ("synthetic:size=4", "size=4 is not possible"),
        ("synthetic:classes=1", "classes=1 is not possible"),
        ("synthetic:noise=2", "noise=2 is not possible"),
        ("cifar100:url=nowhere", "url=nowhere is not possible"),
        ("cifar11", "did you mean 'cifar10'"),
    ],
)
def test_bad_options_are_usage_errors(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(text)


@pytest.mark.parametrize("size", [1, 33, 99])
def test_a_split_is_a_subset_and_all_the_others(size: int) -> None:
    part = unbalanced_part()
    rest, held_out = part.split(size)
    expected = part.subset(size)
    assert torch.equal(held_out.inputs, expected.inputs)
    assert torch.equal(held_out.targets, expected.targets)
    numbers = [each.inputs[:, 0, 0, 0].tolist() for each in (rest, held_out)]
    assert sorted(numbers[0] + numbers[1]) == part.inputs[:, 0, 0, 0].tolist()
    assert numbers[0] == sorted(numbers[0])


def test_what_is_prepared_for_a_run_is_not_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(train_size=1000, data_dir=str(tmp_path))
    write_json(RunFolder(tmp_path).config, dataclasses.asdict(config))
    prepare(str(tmp_path))
    monkeypatch.delattr(Digits, "load")
    assert len(parts_of(config)[0]) == 1000


def test_a_forked_rank_loads_what_it_reads_from_files_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share an open file would move its position for each other."""
    loads: list[int] = []

    def load(_dataset: Digits, _folder: Path, **_: object) -> tuple[Samples, Samples]:
        loads.append(os.getpid())
        samples = Samples(inputs=mock.MagicMock(), targets=torch.arange(64) % 10)
        return samples, samples

    monkeypatch.setattr(Digits, "load", load)
    config = make_config(seed=5, data_dir=str(tmp_path))
    for process in (1, 1, 2, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        parts_of(config)
    assert loads == [1, 2]


def test_a_held_out_part_takes_the_test_sets_place(tmp_path: Path) -> None:
    config = make_config(train_size=1000, test_size=100, holdout_size=200, data_dir=str(tmp_path))
    train, held_out = parts_of(config)
    of_training, test = build("digits").load(tmp_path, seed=1, train_size=1000, test_size=100)
    assert (len(train), len(held_out)) == (800, 200)
    assert torch.equal(held_out.inputs, of_training.subset(200).inputs)
    assert len(parts_of(dataclasses.replace(config, holdout_size=0))[1]) == len(test)
