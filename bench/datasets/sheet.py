"""A picture of samples of an image set: training and test images, and training images as augmentation changes them."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, ImageDraw

from bench.core.errors import UsageError
from bench.datasets.base import Dataset, Samples

_COLUMNS, _ROWS = 24, 8  # most classes, and most samples of each class
_GAP = 2  # pixels between images
_HEADING = 14  # height of a heading in pixels
_SEED = 1  # of generated samples and of augmentation


def sheet_of(dataset: Dataset, data_dir: Path) -> Image.Image:
    """Return a picture with a column for each of some classes, evenly chosen among all.

    Rows are training images, test images, and the first row of training images after each of several augmentations.
    Images are as the network gets them, with values scaled so that the smallest of the picture is black and the largest
    is white.

    Raises:
        UsageError: the set has no images.
        DatasetError: the set cannot be loaded.
    """
    shape = dataset.dummy_batch(1, "meta").shape
    if len(shape) != 4 or shape[1] not in (1, 3) or not dataset.has_classes:
        raise UsageError(f"{dataset.component_name} has no images of 1 or 3 channels to draw; name a set of images")
    train, test = dataset.load(data_dir, seed=_SEED)
    generator = torch.Generator().manual_seed(_SEED)
    labels = train.targets.unique()
    labels = labels[torch.isin(labels, test.targets)]
    labels = labels[torch.linspace(0, len(labels) - 1, min(len(labels), _COLUMNS)).round().long()]
    rows = [_rows(each, labels) for each in (train, test)]
    first, _ = train.at(rows[0][0])
    parts = {
        "training": torch.stack([dataset.normalise(train.at(row)[0]) for row in rows[0]]),
        "test (held out)": torch.stack([dataset.normalise(test.at(row)[0]) for row in rows[1]]),
        "training, augmented": torch.stack(
            [dataset.normalise(dataset.augment(first, generator)) for _ in range(_ROWS // 2)]
        ),
    }
    pixels = torch.cat([images.flatten() for images in parts.values()])
    low, high = float(pixels.min()), float(pixels.max())
    pictures = [(name, _tiled((images - low) / max(high - low, 1e-9))) for name, images in parts.items()]
    sheet = Image.new("RGB", (max(p.width for _, p in pictures), sum(p.height + _HEADING for _, p in pictures)), "gray")
    top = 0
    for name, picture in pictures:
        ImageDraw.Draw(sheet).text((_GAP, top), name, fill="white")
        sheet.paste(picture, (0, top + _HEADING))
        top += picture.height + _HEADING
    return sheet


def _rows(samples: Samples, labels: torch.Tensor) -> torch.Tensor:
    """Return the indices of the samples to draw, int64 [rows, labels]: each column has samples of one label."""
    members = [(samples.targets == label).nonzero().flatten() for label in labels.tolist()]
    return torch.stack([each[: min(_ROWS, *map(len, members))] for each in members], dim=1)


def _tiled(images: torch.Tensor) -> Image.Image:
    """Return images [rows, columns, channels, height, width], with values from 0 to 1, as one picture."""
    rows, columns, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (0, _GAP, 0, _GAP), value=0.5)
    table = padded.permute(0, 3, 1, 4, 2).reshape(rows * (height + _GAP), columns * (width + _GAP), channels)
    return Image.fromarray((table.expand(-1, -1, 3) * 255).round().to(torch.uint8).numpy())
