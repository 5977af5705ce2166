"""CompressorsConfig: what `bench compressors` measures, complete; crosses from the command line to the worker."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, Self

from bench.core.errors import UsageError

Gradients = Literal["synthetic", "recorded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressorsConfig:
    """One measurement, every default filled in.

    Attributes:
        compressors: spec texts, in the order in which they are shown; none is a hook of PyTorch's own.
        model: spec text; its layers' shapes are what gradients have.
        dataset: spec text; what recorded gradients are trained on, and the number of classes for both kinds.
        gradients: synthetic (heavy-tailed, each layer at a scale of its own) or recorded in real training steps.
        repeats: timed turns of each compressor; compressors alternate.
        bucket_mb: bucket size in MiB, as DDP would lay the layers.
        seed: of weights, data, synthetic gradients and compressors.
        device, threads, data_dir: as in `RunConfig`.
    """

    compressors: tuple[str, ...]
    model: str
    dataset: str
    gradients: Gradients = "synthetic"
    repeats: int = 9
    bucket_mb: float = 25.0
    seed: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    data_dir: str = "data"

    @property
    def num_turns(self) -> int:
        """Timed turns of all compressors together: what progress is counted in."""
        return len(self.compressors) * self.repeats

    def columns(self) -> dict[str, Any]:
        """The columns of `COMPRESSORS` that are equal in all rows."""
        shared = ("model", "dataset", "gradients", "repeats", "bucket_mb", "seed", "device", "threads")
        return {name: getattr(self, name) for name in shared}

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
            return cls(compressors=tuple(values.pop("compressors")), **values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{path} is not the config.json of `bench compressors`: {error}") from None
