"""CompressorsRequest: a measurement as the user asks for it, every default of `bench compressors` in one place."""

from __future__ import annotations

import dataclasses
from typing import Literal

from bench.core.compressors_config import Gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressorsRequest:
    """What `bench compressors` was given; None means "choose for me". `CompressorsConfig` explains the other fields.

    Attributes:
        compressors: spec texts, separated by commas; None: all there are but the hooks of PyTorch's own.
        device: "auto": a GPU where torch sees one.
    """

    compressors: str | None = None
    model: str = "resnet20"
    dataset: str = "digits"
    gradients: Gradients = "synthetic"
    repeats: int = 9
    bucket_mb: float = 25.0
    seed: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    data_dir: str = "data"
    timeout_s: float = 300.0
