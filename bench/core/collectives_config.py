"""CollectivesConfig: one sweep of `bench collectives`, complete; what crosses from the command line to every rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from bench.core.errors import UsageError

Dtype = Literal["fp32", "fp16", "bf16", "int8", "int32"]
_ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivesConfig:
    """What is summed, how, and where, every default filled in.

    Attributes:
        pairs: (collective, compressor) as spec texts, in the order in which they are shown; each can work together.
        sizes: bytes of the tensor that is summed.
        dtype: type of its elements; what a compressor sends may have another.
        overlap: share of positions whose magnitude all ranks have in common, 0 to 1.
        iters, warmup: timed and untimed sums of one pair in one round.
        rounds: how often each pair has its turn; pairs alternate.
        seed: of the synthetic tensors and the compressors.
        device, timeout_s, world_size, hosts, ranks_per_host, threads, cluster, uplink_bps, downlink_bps, latency_s: as
            in `RunConfig`.
    """

    pairs: tuple[tuple[str, str], ...]
    sizes: tuple[int, ...]
    dtype: Dtype
    overlap: float
    iters: int
    warmup: int
    rounds: int
    seed: int
    device: Literal["cpu", "cuda"]
    timeout_s: float
    world_size: int
    hosts: int = 1
    ranks_per_host: int
    threads: int
    cluster: dict[str, Any] | None = None
    uplink_bps: float | None = None
    downlink_bps: float | None = None
    latency_s: float | None = None
    nnodes: ClassVar[int] = 1
    node_rank: ClassVar[int] = 0
    rdzv_endpoint: ClassVar[str | None] = None

    @property
    def num_turns(self) -> int:
        """Turns of all pairs at all sizes together: what progress is counted in."""
        return len(self.pairs) * len(self.sizes) * self.rounds

    def columns(self) -> dict[str, Any]:
        """The columns of `COLLECTIVES` that are equal in all rows."""
        shared = ("dtype", "world_size", "hosts", "ranks_per_host", "uplink_bps", "downlink_bps", "latency_s")
        return {name: getattr(self, name) for name in shared}

    def count(self, size: int) -> int:
        """Elements of a tensor of at most `size` bytes."""
        return size // _ITEMSIZE[self.dtype]

    def size_bytes(self, size: int) -> int:
        """Bytes of these elements."""
        return self.count(size) * _ITEMSIZE[self.dtype]

    def to_json(self) -> str:
        """The configuration as JSON text, keys in declaration order."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, path: Path) -> Self:
        """Read what `to_json` wrote.

        Raises:
            UsageError: the file is not such a configuration.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            pairs = tuple((collective, compressor) for collective, compressor in values.pop("pairs"))
            return cls(pairs=pairs, sizes=tuple(values.pop("sizes")), **values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{path} is not the config.json of `bench collectives`: {error}") from None
