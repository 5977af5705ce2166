"""CollectivesRequest: a sweep as the user asks for it, every default of `bench collectives` in one place."""

from __future__ import annotations

import dataclasses

from bench.core.collectives_config import Dtype
from bench.core.request import HostsRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivesRequest(HostsRequest):
    """What `bench collectives` was given; None means "choose for me". `CollectivesConfig` explains the other fields.

    Attributes:
        sizes: bytes of the tensor, a list or ranges that double.
        compressors: spec texts, separated by commas.
        collectives: likewise; None: every collective that takes some payload.
    """

    sizes: str = "10kB,1MB,10MB"
    compressors: str = "none"
    collectives: str | None = None
    dtype: Dtype = "fp32"
    overlap: float = 0.0
    iters: int = 20
    warmup: int = 3
    rounds: int = 5
    seed: int = 1
    timeout_s: float = 300.0
