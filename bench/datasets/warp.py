"""Random rotation, scale, shear and shift of images, in whole numbers only.

Draws, coordinates and interpolation are integers. So a generator leads to the same pixels on every machine and device,
with any number of threads.
"""

import torch
from torch.nn import functional

# Fixed point: a number x is kept as the integer x * _ONE.
_BITS = 16
_ONE = 1 << _BITS
# The largest change of each kind; draws are uniform between -limit and +limit.
_ANGLE = 11_438  # 10 degrees, in radians
_SCALE = 6_554  # 10 %
_SHEAR = 9_830  # 0.15: a pixel one row higher moves 0.15 pixels to the side
_SHIFT = 4_096  # 1/16 of the side of the image, in each direction
_BORDER = 2  # black pixels on each side, so that a pixel far outside has only black neighbours


def rotate_scale_shear_shift(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Change each image at random: rotate it by up to 10 degrees, scale it by up to 10 %, shear it by up to 0.15.

    Before that, each image is shifted by up to 1/16 of its side in each direction. Pixels are interpolated bilinearly;
    what comes from outside of the image is black.

    Args:
        images: uint8 [num_samples, channels, size, size]; not changed.
        generator: random generator on the CPU; advanced by 5 draws per image.

    Returns:
        A new tensor of the same shape, dtype and device.
    """
    num_samples, channels, size, _ = images.shape
    draws = torch.randint(1 - _ONE, _ONE, (num_samples, 5), generator=generator)
    angle, scale, shear, right, down = (
        draw * limit >> _BITS for draw, limit in zip(draws.T, (_ANGLE, _SCALE, _SHEAR, _SHIFT, _SHIFT), strict=True)
    )
    shrink = _ONE * _ONE // (_ONE + scale)
    # The first terms of the Taylor series; at 10 degrees, the sine is off by 1e-6 and the cosine by 4e-5.
    sine = (angle - (angle**3 // 6 >> 2 * _BITS)) * shrink >> _BITS
    cosine = (_ONE - (angle**2 >> _BITS + 1)) * shrink >> _BITS
    # The pixel that is (x, y) away from the centre is looked up at (cosine x + across y, sine x + along y) from there.
    across = (shear * cosine >> _BITS) - sine
    along = (shear * sine >> _BITS) + cosine
    column, right_share = _split(cosine, across, right, size, images.device)
    row, lower_share = _split(sine, along, down, size, images.device)
    # Each number holds four neighbouring pixels, so that one look-up finds all four.
    pixels = functional.pad(images, (_BORDER,) * 4).to(torch.int32)
    pixels[..., :-1] |= pixels[..., 1:] << 8
    pixels[..., :-1, :] |= pixels[..., 1:, :] << 16
    place = torch.add(column, row, alpha=size + 2 * _BORDER).long().unsqueeze(1).expand(-1, channels, -1)
    found = pixels.flatten(2).gather(2, place)
    upper, lower = (_between(found >> shift, found >> shift + 8, right_share) for shift in (0, 16))
    mixed = (upper << 8).add_(lower.sub_(upper).mul_(lower_share.unsqueeze(1)))
    return (mixed.add_(_ONE // 2) >> _BITS).to(torch.uint8).view(images.shape)


def _split(
    by_column: torch.Tensor, by_row: torch.Tensor, shift: torch.Tensor, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each pixel is looked up in one direction: (whole part, rest in 1/256), int32 [n, size * size].

    The whole part counts from the edge of the border, and is at most `size + _BORDER`.

    Args:
        by_column: how far the look-up moves from one column to the next, [n].
        by_row: how far it moves from one row to the next, [n].
        shift: how far the image moves in this direction, in sides, [n].
        size: side of an image.
        device: device of the result.
    """
    from_centre = 2 * torch.arange(size) - (size - 1)  # in halves of a pixel
    centre = (size - 1 + 2 * _BORDER) * _ONE - 2 * size * shift
    row, column = (
        each.to(device, torch.int32)
        for each in (torch.outer(by_row, from_centre) + centre.view(-1, 1), torch.outer(by_column, from_centre))
    )
    halves = (row.unsqueeze(2) + column.unsqueeze(1)).flatten(1).clamp_(0, 2 * (size + _BORDER) * _ONE)
    return halves >> _BITS + 1, halves >> _BITS - 7 & 255


def _between(first: torch.Tensor, second: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return 256 times the mean of the lowest bytes of two int32 tensors; `second` weighs `share` / 256."""
    first = first & 255
    return (first << 8).add_((second & 255).sub_(first).mul_(share.unsqueeze(1)))
