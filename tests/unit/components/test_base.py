"""Samples of any data set: augmentation equals a loop over images, and subsets keep the shares of the classes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from bench.core import spec
from bench.core.errors import UsageError
from bench.datasets.base import DatasetError, Samples, crop_and_flip, normalise


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(num_samples: int, height: int = 32, width: int = 32, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    shape = (num_samples, 3, height, width)
    return torch.randint(1, 256, shape, generator=generator(99)).to(dtype)  # 0 is reserved for the border


def loop_over_images(x: torch.Tensor, seed: int, *, flip: bool, padding: int, border: str) -> torch.Tensor:
    """Pad, crop and mirror one image after another."""
    draws = generator(seed)
    top, left = (torch.randint(2 * padding + 1, (len(x), 1), generator=draws).flatten().tolist() for _ in range(2))
    mirrored = torch.randint(2, (len(x), 1), generator=draws, dtype=torch.bool) if flip else torch.zeros(len(x))
    height, width = x.shape[2:]
    results = []
    for i, image in enumerate(x):
        mode = "constant" if border == "zero" else "reflect"
        padded = functional.pad(image.double(), (padding,) * 4, mode=mode).to(x.dtype)
        crop = padded[:, top[i] : top[i] + height, left[i] : left[i] + width]
        results.append(crop.flip(2) if mirrored[i] else crop)
    return torch.stack(results)


@pytest.mark.parametrize("border", ["zero", "reflect"])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("size", [(1, 32, 32), (33, 32, 32), (7, 12, 9)])
def test_equals_a_loop_over_images(border: str, flip: bool, padding: int, size: tuple[int, int, int]) -> None:
    x = images(*size)
    result = crop_and_flip(x, generator(5), flip=flip, padding=padding, border=border)  # type: ignore[arg-type]
    assert result.dtype == torch.uint8
    assert torch.equal(result, loop_over_images(x, 5, flip=flip, padding=padding, border=border))


def test_every_shift_and_both_mirrorings_occur_equally_often() -> None:
    x = torch.zeros(16_200, 1, 32, 32, dtype=torch.uint8)
    x[:, :, 16, 8] = 1  # the new position of this pixel shows the shift and the mirroring
    landed = crop_and_flip(x, generator(), flip=True).flatten(1).argmax(1)
    rows, columns = landed // 32, landed % 32
    kept = columns <= 12  # unmirrored it is in columns 4 to 12, mirrored in 19 to 27
    shifts = (rows - 12) * 18 + torch.where(kept, columns - 4, columns - 10)
    counts = shifts.bincount(minlength=162)
    assert len(counts) == 162
    # 100 expected in each of 162 cells; the probability of five standard deviations in any cell is below 1e-4.
    assert (counts - 100).abs().max() < 50


def test_float_and_non_contiguous_images_are_moved_likewise() -> None:
    x = images(5)
    expected = crop_and_flip(x, generator(), flip=True)
    assert torch.equal(crop_and_flip(x.float(), generator(), flip=True), expected.float())
    channels_last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(crop_and_flip(channels_last, generator(), flip=True), expected)


def test_input_and_global_generator_are_untouched_and_draws_follow_the_seed() -> None:
    x = images(8)
    before, state = x.clone(), torch.get_rng_state()
    draws = generator(3)
    first, second = crop_and_flip(x, draws, flip=True), crop_and_flip(x, draws, flip=True)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, crop_and_flip(x, generator(3), flip=True))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_normalise_is_the_formula_per_channel_in_a_new_tensor(dtype: torch.dtype) -> None:
    x = images(2, dtype=dtype)
    before, mean, std = x.clone(), (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    expected = (x.double() / 255 - torch.tensor(mean).double().view(3, 1, 1)) / torch.tensor(std).double().view(3, 1, 1)
    result = normalise(x, mean, std)
    assert result.dtype == torch.float32
    assert torch.equal(x, before)
    if dtype == torch.uint8:  # floats are scaled already
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def build(text: str) -> Any:
    return spec.build("datasets", text)


def unbalanced_part() -> Samples:
    labels = torch.tensor([0] * 60 + [2] * 30 + [1] * 10)[
        torch.randperm(100, generator=torch.Generator().manual_seed(4))
    ]
    images = torch.arange(100, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 32, 32)
    return Samples(inputs=images, targets=labels)


@pytest.mark.parametrize("size", range(1, 101))
def test_a_subset_keeps_the_shares_of_the_classes_and_the_order_and_a_split_has_all_the_others(size: int) -> None:
    part = unbalanced_part()
    subset = part.subset(size)
    assert len(subset) == size
    expected = torch.tensor([0.6, 0.1, 0.3]) * size
    assert ((subset.targets.bincount(minlength=3) - expected).abs() <= 1).all()
    numbers = subset.inputs[:, 0, 0, 0].long()
    assert (numbers.diff() > 0).all()
    assert torch.equal(part.targets[numbers], subset.targets)
    if size < 100:
        rest, held_out = part.split(size)
        assert torch.equal(held_out.inputs, subset.inputs)
        assert torch.equal(held_out.targets, subset.targets)
        others = rest.inputs[:, 0, 0, 0].tolist()
        assert others == sorted(set(range(100)) - set(numbers.tolist()))


def test_smaller_subsets_lie_inside_larger_ones() -> None:
    part = unbalanced_part()
    chosen = [set(part.subset(size).inputs[:, 0, 0, 0].tolist()) for size in range(1, 101)]
    assert all(smaller < larger for smaller, larger in itertools.pairwise(chosen))


def test_sizes_are_known_without_loading_and_subsets_are_balanced(tmp_path: Path) -> None:
    digits = build("digits")
    train, test = digits.load(tmp_path, seed=1, train_size=100, test_size=50)
    assert [part.targets.bincount().tolist() for part in (train, test)] == [[10] * 10, [5] * 10]
    for sizes, message in (
        ({"train_size": 1348}, "digits has 1347 training samples, so 1348 are not possible; ask for 1 to 1347"),
        ({"test_size": 451}, "digits has 450 test samples, so 451 are not possible; ask for 1 to 450"),
        ({"train_size": 0}, "digits has 1347 training samples, so 0 are not possible"),
    ):
        with pytest.raises(DatasetError, match=message):
            digits.load(tmp_path, seed=1, **sizes)
    cifar, few, synthetic = (build(text) for text in ("cifar10", "synthetic:train_size=30", "synthetic"))
    assert cifar.resolve_sizes(None, 100) == (50_000, 100)
    assert few.resolve_sizes(None, 5_000_000) == (30, 5_000_000)
    with pytest.raises(UsageError, match="synthetic makes at least one test sample, so 0 are not possible"):
        synthetic.resolve_sizes(None, 0)
