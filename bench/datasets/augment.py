"""Augmentation of a whole batch: a random crop and flip of each image, and normalisation.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), section 4.2: four pixels of padding
on each side, a random 32x32 crop of the padded image or its mirror image.

One gather moves the uint8 pixels of the whole batch, without a loop over images, in about 0.1 ms for 32 images on one
core. Use it as `normalise(crop_and_flip(images, generator, flip=dataset.mirror), dataset.mean, dataset.std)`; a test
batch is only normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn import functional

_PAD_MODES = {"zero": "constant", "reflect": "reflect"}


def crop_and_flip(
    images: torch.Tensor,
    generator: torch.Generator,
    *,
    flip: bool,
    padding: int = 4,
    border: Literal["zero", "reflect"] = "zero",
) -> torch.Tensor:
    """Shift each image by up to `padding` pixels in both directions and mirror it with probability 1/2, at random.

    Args:
        images: any dtype [num_samples, channels, height, width], not changed.
        generator: random generator on the CPU; advanced by 2 draws per image (3 with `flip`).
        flip: mirror left and right with probability 1/2.
        padding: border in pixels on each side; each of the (2 padding + 1)^2 shifts is equally likely.
        border: what is outside the image: "zero" for black, "reflect" for the image reflected at its edge.

    Returns:
        A new tensor of the same shape, dtype and device.
    """
    num_samples, channels, height, width = images.shape
    num_shifts = 2 * padding + 1
    top = torch.randint(num_shifts, (num_samples, 1), generator=generator)
    left = torch.randint(num_shifts, (num_samples, 1), generator=generator)
    rows = top + torch.arange(height)  # [num_samples, height], positions in the padded image
    columns = left + torch.arange(width)
    if flip:
        mirrored = torch.randint(2, (num_samples, 1), generator=generator, dtype=torch.bool)
        columns = torch.where(mirrored, columns.flip(1), columns)
    pixels = rows.unsqueeze(2) * (width + 2 * padding) + columns.unsqueeze(1)
    padded = functional.pad(images, (padding, padding, padding, padding), mode=_PAD_MODES[border])
    index = pixels.view(num_samples, 1, height * width).expand(-1, channels, -1).to(images.device)
    return padded.flatten(2).gather(2, index).view(images.shape)


def normalise(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Return (pixel / 255 - mean) / std, per channel.

    Args:
        images: uint8 [num_samples, channels, height, width], not changed.
        mean: mean per channel, of pixel values scaled to [0, 1].
        std: standard deviation per channel, on the same scale.

    Returns:
        float32, a new tensor of the same shape and device.
    """
    per_channel = (len(mean), 1, 1)
    offset = torch.tensor(mean, device=images.device).view(per_channel) * 255
    scale = torch.tensor(std, device=images.device).view(per_channel) * 255
    return images.to(torch.float32, copy=True).sub_(offset).div_(scale)
