"""Data sets that are built in: digits and generated images have the promised sizes, types and statistics."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import cast
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from bench.core import registry, spec
from bench.core.run_folder import RunFolder, write_json
from bench.datasets.base import Dataset, Samples, normalise
from bench.datasets.built_in import Digits, Synthetic, _axes, _two_colours
from bench.models.cnn import Linear, SmallCnn
from bench.rank.worker import parts_of, prepare
from tests.testing.configs import make_config

NOWHERE = Path(__file__) / "nowhere"  # a file has no children
BUILT_IN = ("digits", "synthetic")
LARGE = "synthetic:size=64,classes=70"


def build(text: str) -> Dataset:
    return cast(Dataset, spec.build("datasets", text))


@pytest.fixture(scope="module")
def parts() -> dict[str, tuple[Samples, Samples]]:
    return {name: build(name).load(NOWHERE, seed=1) for name in BUILT_IN}


def test_all_sets_are_found_with_a_description() -> None:
    found = registry.entries("datasets")
    assert set(found) == {
        "cifar10", "cifar100", "digits", "glyphs", "imagefolder", "site", "stdlib", "synthetic", "text",
    }  # fmt: skip
    assert all(len(entry.description) > 20 for entry in found.values())


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_set_needs_no_preparation_and_has_what_it_promises(
    name: str, parts: dict[str, tuple[Samples, Samples]]
) -> None:
    dataset = build(name)
    dataset.prepare(NOWHERE)
    assert dataset.is_present(NOWHERE)
    assert dataset.status(NOWHERE) == "built in, nothing to prepare"
    assert not NOWHERE.exists()
    assert tuple(len(part) for part in parts[name]) == dataset.sizes()
    for part in parts[name]:
        assert part.inputs.dtype == torch.uint8
        assert part.inputs.shape == (len(part), 3, 32, 32)
        assert part.targets.dtype == torch.int64
        assert sorted(set(part.targets.tolist())) == list(range(dataset.num_classes))
    large = build(LARGE)
    many = large.load(NOWHERE, seed=1, train_size=700, test_size=1)
    for each, train, tolerance in ((dataset, parts[name][0], 2e-3), (large, many[0], 1e-2)):
        pixels = train.inputs.double() / 255
        mean, std = torch.tensor(each.mean).double(), torch.tensor(each.std).double()
        torch.testing.assert_close(pixels.mean((0, 2, 3)), mean, atol=min(tolerance, 5e-3), rtol=0)
        torch.testing.assert_close(pixels.std((0, 2, 3)), std, atol=tolerance, rtol=0)


def test_digits_are_the_same_with_another_seed_and_where_their_file_lies_elsewhere(
    parts: dict[str, tuple[Samples, Samples]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for part, same in zip(parts["digits"], build("digits").load(NOWHERE, seed=2), strict=True):
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
    assert torch.equal(train.inputs, train.inputs[:, :1].expand(-1, 3, -1, -1))  # grey
    assert (int(train.inputs.min()), int(train.inputs.max())) == (0, 255)
    share = test.targets.bincount() / (train.targets.bincount() + test.targets.bincount())
    assert ((share - 0.25).abs() < 0.005).all()


@pytest.mark.parametrize("text", [LARGE, "synthetic:size=8,classes=1000", "synthetic:size=100,classes=3"])
def test_generated_images_have_the_size_and_classes_asked_for(text: str) -> None:
    dataset = build(text)
    train, test = dataset.load(NOWHERE, seed=1, train_size=2 * dataset.num_classes, test_size=5)
    assert train.inputs.shape == (len(train), 3, dataset.image_size, dataset.image_size)
    assert test.inputs.shape == (5, 3, dataset.image_size, dataset.image_size)
    for round_ in train.targets.split(dataset.num_classes):  # each class once
        assert sorted(round_.tolist()) == list(range(dataset.num_classes))


def test_beyond_ten_a_class_is_told_by_the_axis_of_its_colours() -> None:
    axes = _axes(100)
    cosines = (axes @ axes.T).abs().fill_diagonal_(0)
    assert float(cosines.max()) < math.cos(math.radians(8))
    labels = torch.arange(1000)
    bright, dark = _two_colours(1000, axes[labels // 10], torch.Generator().manual_seed(1))
    along = functional.cosine_similarity((bright - dark).view(1000, 3), axes[labels // 10])
    torch.testing.assert_close(along, torch.ones(1000))


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


@pytest.mark.slow
@pytest.mark.parametrize("text", [LARGE, "synthetic:size=100,classes=7"])
def test_a_generated_image_does_not_depend_on_how_many_are_asked_for(text: str) -> None:
    many, _ = build(text).load(NOWHERE, seed=1, train_size=600, test_size=1)
    for size in (1, 60, 520):
        few, _ = build(text).load(NOWHERE, seed=1, train_size=size, test_size=1)
        assert same(few, Samples(inputs=many.inputs[:size], targets=many.targets[:size]))


def make(train_size: int, test_size: int = 10, *, seed: int = 1, noise: float = 0.05) -> tuple[Samples, Samples]:
    return Synthetic(noise=noise).load(NOWHERE, seed=seed, train_size=train_size, test_size=test_size)


def same(a: Samples, b: Samples) -> bool:
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


def test_images_depend_on_the_seed_alone_and_all_differ() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    train, test = make(1000, 1000)
    try:
        torch.set_num_threads(2)
        again = make(1000, 1000)
    finally:
        torch.set_num_threads(threads)
    assert all(same(a, b) for a, b in zip((train, test), again, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    other, _ = make(1000, seed=2)
    assert not torch.equal(train.targets, other.targets)
    assert len(torch.unique(torch.cat([train.inputs, test.inputs, other.inputs]).flatten(1), dim=0)) == 3000


@pytest.mark.parametrize("size", [1, 15, 499, 500, 501, 1037])
def test_a_smaller_set_is_the_beginning_of_a_larger_one_and_balanced(size: int) -> None:
    large, (small, _) = make(1200)[0], make(size)
    assert same(small, Samples(inputs=large.inputs[:size], targets=large.targets[:size]))
    counts = small.targets.bincount(minlength=10)
    assert counts.max() - counts.min() <= 1


def test_noise_changes_pixels_only_a_little() -> None:
    clean, noisy = make(500, noise=0)[0], make(500, noise=0.1)[0]
    difference = (noisy.inputs.double() - clean.inputs.double()) / 255
    assert difference.std().item() == pytest.approx(0.1, rel=0.1)


@pytest.mark.long
@pytest.mark.slow
def test_linear_model_stays_near_chance_where_a_small_network_learns() -> None:
    train, test = make(3000, 500)
    linear, network = (accuracy_after_training(model, train, test) for model in (Linear(), SmallCnn()))
    assert linear < 0.3
    assert network > linear + 0.25


def accuracy_after_training(model: Linear | SmallCnn, train: Samples, test: Samples) -> float:
    torch.manual_seed(1)
    network: nn.Module = model.build(10)
    epochs, batch_size = 3, 50
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    x, y = (normalise(part.inputs, Synthetic.mean, Synthetic.std) for part in (train, test))
    for _ in range(epochs):
        for chosen in torch.randperm(len(train)).view(-1, batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(network(x[chosen]), train.targets[chosen]))
            optimizer.step()
    network.eval()
    with torch.no_grad():
        return float((network(y).argmax(1) == test.targets).double().mean())
