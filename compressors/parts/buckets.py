"""Functions that process the layers of a bucket one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from collectives.payloads import Bundle, Payload
from compressors.kernels.residuals import add
from compressors.layer import Layer

# (gradient, residual, left, layer) -> payload; all tensors are fp32 [layer.numel], and `left` is overwritten
EncodeSum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layer], Payload]


class NonFinite(ArithmeticError):
    """The sum of gradient and residual contains a NaN or an infinity."""


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if all elements are finite; takes one pass, or two if the sum of the elements is not finite."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def clip_factor(tensors: Sequence[torch.Tensor], limit: float) -> float:
    """Return the factor by which to multiply these tensors so that their common L2 norm is at most `limit`.

    The factor is 1 if the norm is at most `limit`. It is also 1 if the norm is not finite, because the factor would
    otherwise turn all finite elements into zeros. `torch.nn.utils.clip_grad_norm_`, which clips the gradients that an
    optimizer gets, divides by norm + 1e-6 instead.
    """
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]
    norm = math.hypot(*map(float, norms))
    return limit / norm if limit < norm < math.inf else 1.0


def split(flat: torch.Tensor | None, layers: Sequence[Layer]) -> Sequence[Any]:
    """Return each layer's part of `flat`, [numel of all layers], as a view; None for each layer if `flat` is None."""
    if flat is None or len(layers) == 1:
        return [flat] * len(layers)  # one layer is returned as it is, because slicing takes as long as a short sum
    return torch.split(flat, [layer.numel for layer in layers])


def summed(
    gradients: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    left: torch.Tensor | None,
    layers: Sequence[Layer],
    *,
    screen: bool = False,
) -> Iterator[torch.Tensor]:
    """Yield the tensor to encode for each layer: gradient + residual, computed only when the next layer is needed.

    The arguments are those of `encode_bucket`.

    Raises:
        NonFinite: `screen` is True, and the tensor of a layer contains NaN or infinity.
    """
    for gradient, old, out in zip(gradients, split(residual, layers), split(left, layers), strict=True):
        if old is not None:
            add(gradient, old, out=out)
        x = gradient if old is None else out
        if screen and not is_finite(x):
            raise NonFinite
        yield x


def each_layer(
    encode: EncodeSum,
    gradients: Sequence[torch.Tensor],
    residual: torch.Tensor,
    left: torch.Tensor,
    layers: Sequence[Layer],
    *,
    screen: bool = False,
) -> Payload:
    """Return one message with the payloads that `encode` makes of each layer's gradient and residual.

    Raises:
        NonFinite: `screen` is True, and gradients + residual contain NaN or infinity.
    """
    of_layers = zip(gradients, split(residual, layers), split(left, layers), layers, strict=True)
    payload = bundled([encode(*each) for each in of_layers])
    if screen and not is_finite(left):  # NaN and infinity stay in `left`
        raise NonFinite
    return payload


def bundled(payloads: Sequence[Payload]) -> Payload:
    """Return the payloads as one message: a bundle, or the payload itself if there is only one."""
    return payloads[0] if len(payloads) == 1 else Bundle(payloads)
