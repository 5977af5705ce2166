"""Which compressors can be calibrated: those whose work can be measured on one rank, bucket by bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.core import spec

if TYPE_CHECKING:
    from compressors.base import Compressor


def cannot_be_calibrated(compressor: Compressor) -> str | None:
    """Why what a compressor takes cannot be measured on one rank, or does not follow from it; one sentence."""
    from compressors.base import MultiRound, OwnHook, TorchHook

    text = spec.short_text(compressor)
    obstacles = (
        (isinstance(compressor, TorchHook), "encodes inside PyTorch's own hook, out of sight; leave it out"),
        (
            isinstance(compressor, OwnHook),
            "encodes nothing itself; calibrate the compressors that it tries, topk or bf16 say",
        ),
        (
            compressor.needs_all_ranks and not isinstance(compressor, MultiRound),
            "has ranks agree with each other before they encode, which is not part of the model; use other options",
        ),
        (
            compressor.one_bucket,
            "wants the whole model as one bucket, which is not how the others are measured; use other options",
        ),
    )
    return next((f"{text} {reason}" for applies, reason in obstacles if applies), None)
