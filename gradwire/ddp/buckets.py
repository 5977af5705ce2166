"""DDP's buckets: their default size, and which layers each bucket contains."""

import itertools
from collections.abc import Sequence

from compressors.base import FP32_BYTES
from compressors.layer import Layer

WHOLE_MODEL_MB = 2.0**20  # more than any model: all layers go into one bucket
MIN_BUCKET_MB, MAX_BUCKET_MB = 1.0, 25.0  # DDP's own default is 25
BUCKET_COST = 0.05  # assumed time of one more bucket, as a share of the time to exchange the model
SMALL_BUCKET = 0.05  # share of the model; gradients of a smaller rest are assumed to take no time to compute


def gradient_mb(layers: Sequence[Layer]) -> float:
    """Return the size of the layers' gradients in MiB, as fp32, with 4 significant digits."""
    return float(f"{sum([layer.numel for layer in layers]) * FP32_BYTES / 2**20:.4g}")


def bucket_size(layers: Sequence[Layer]) -> float:
    """Return a size for DDP's buckets in MiB: 25 to 45 % of these layers' gradients, at least 1 and at most 25.

    The exchange of the last bucket does not overlap with backward, so this function chooses a size that gives few
    buckets and a small last bucket.
    """
    model_mb = gradient_mb(layers)

    def cost(bucket_mb: float) -> float:
        sizes = [gradient_mb(bucket) for bucket in buckets_of(layers, bucket_mb)]
        exposed = next(mb for mb in itertools.accumulate(reversed(sizes)) if mb >= SMALL_BUCKET * model_mb)
        return exposed + BUCKET_COST * model_mb * len(sizes)

    wanted = [round(model_mb * percent / 100, 2) for percent in range(45, 24, -1)]
    return min([min(MAX_BUCKET_MB, max(MIN_BUCKET_MB, mb)) for mb in wanted], key=cost)


def buckets_of(layers: Sequence[Layer], bucket_mb: float) -> list[list[Layer]]:
    """Return the layers in buckets of at least `bucket_mb` MiB of fp32 gradients, as DDP groups them.

    Layers are in reverse order, from the last to the first, because their gradients usually become ready in this order.
    The last bucket may be smaller.
    """
    buckets: list[list[Layer]] = [[]]
    numel = 0
    for layer in reversed(layers):
        if numel * FP32_BYTES >= bucket_mb * 2**20:
            buckets.append([])
            numel = 0
        buckets[-1].append(layer)
        numel += layer.numel
    return buckets
