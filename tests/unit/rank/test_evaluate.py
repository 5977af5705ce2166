"""Evaluation: the same samples each time, unchanged weights, and no effect on the training."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.datasets.base import DatasetError, Samples, normalise
from bench.datasets.built_in import Digits, Synthetic
from bench.rank.data import EVALUATION_BATCH, TRAIN_SAMPLES, evaluate, train_sample
from bench.rank.progress import PROGRESS_EVERY_S, ProgressFile


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_part(size: int, seed: int) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Samples(inputs=images, targets=torch.arange(size) % 10)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3072, 10))


def test_each_part_is_classified_with_the_weights_and_statistics_of_now() -> None:
    model, dataset = make_model(), Digits()
    parts = [make_part(300, seed=1), make_part(40, seed=2)]
    before = [buffer.clone() for buffer in model.buffers()]
    found = evaluate(model, parts, dataset, torch.device("cpu"))
    assert model.training
    assert all(torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))
    model.eval()
    for part, quality in zip(parts, found, strict=True):
        with torch.no_grad():
            logits = model(normalise(part.inputs, dataset.mean, dataset.std))
        assert quality.accuracy == float((logits.argmax(1) == part.targets).double().mean())
        assert quality.loss == pytest.approx(float(nn.functional.cross_entropy(logits, part.targets)), rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, 1e300])  # too large for fp32
def test_samples_that_hold_nan_are_refused_and_a_model_that_does_is_not(value: float) -> None:
    model, part = make_model(), make_part(40, seed=2)
    broken = Samples(inputs=part.inputs.double(), targets=part.targets)
    broken.inputs[7, 0, 0, 0] = value
    with pytest.raises(
        DatasetError, match=r"is nan, because the data hold NaN or infinite values, or values too large"
    ):
        evaluate(model, [part, broken], Digits(), torch.device("cpu"))
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    (quality,) = evaluate(model, [part], Digits(), torch.device("cpu"))
    assert math.isnan(quality.loss)


def test_training_samples_are_a_thousand_with_classes_as_in_all_or_all_there_are() -> None:
    many, few = make_part(2 * TRAIN_SAMPLES + 10, seed=3), make_part(30, seed=4)
    sample = train_sample(many)
    assert sample.targets.bincount().tolist() == [TRAIN_SAMPLES // 10] * 10
    assert torch.equal(sample.inputs, train_sample(many).inputs)
    assert train_sample(few) is few


def test_every_mini_batch_is_told_of() -> None:
    told: list[None] = []
    parts = [make_part(EVALUATION_BATCH + 1, seed=1), make_part(40, seed=2)]
    evaluate(make_model(), parts, Digits(), torch.device("cpu"), on_batch=lambda: told.append(None))
    assert len(told) == 2 + 1


def test_of_larger_images_as_many_fewer_are_classified_at_once() -> None:
    sizes: list[int] = []
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))
    model.register_forward_hook(lambda _, x, y: sizes.append(len(x[0])))
    part = Samples(inputs=torch.zeros(70, 3, 64, 64, dtype=torch.uint8), targets=torch.arange(70) % 10)
    evaluate(model, [part], Synthetic(size=64), torch.device("cpu"))
    assert sizes == [EVALUATION_BATCH // 4, 70 - EVALUATION_BATCH // 4]


def test_while_an_evaluation_takes_its_time_the_launcher_hears_of_it_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    progress = ProgressFile(path)
    progress.repeat()  # before the first step
    progress.report(step=7, total_steps=9, epoch=0.5, samples=28, loss=lambda: 1.0)
    progress.repeat()
    (line,) = path.read_text().splitlines()
    time.sleep(PROGRESS_EVERY_S)
    progress.repeat()
    assert path.read_text().splitlines() == [line, line]
    progress._file.close()  # type: ignore[union-attr]
    of_another_rank = ProgressFile(None)
    of_another_rank.report(step=7, total_steps=9, epoch=0.5, samples=28, loss=lambda: 1.0)
    of_another_rank.repeat()
