"""RunConfig: the one value that crosses from the command line to the launcher to every rank."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Literal, Self

from bench.core.errors import UsageError

Schedule = Literal["constant", "cosine", "step"]
Trigger = Literal["async", "sync"]
Nonfinite = Literal["skip", "raise", "zero"]

# What does not identify the experiment: labels, places, and what only observes the run.
_NOT_IDENTITY = frozenset(
    {"name", "filled", "data_dir", "nnodes", "node_rank", "rdzv_endpoint", "timeout_s", "profile", "save_model"}
)
# Written out in `filled` with every default; the short text is for people.
_COMPONENTS = ("model", "dataset", "optimizer", "compressor", "collective", "strategy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, complete: every default is filled in. Field names are the CSV's column names.

    Attributes:
        model, dataset, optimizer, compressor, collective, strategy: spec texts, only options that differ from their
            default.
        filled: the same six specs with every option, by field name; this is what the digest covers.
        world_size: ranks of the whole job.
        batch_size: samples per rank and step.
        epochs, steps: length of the run; exactly one of the two is set.
        lr: peak learning rate before `lr_scaling`.
        warmup_epochs: the learning rate rises linearly from zero over so many epochs.
        lr_scaling: "linear" multiplies lr by world_size.
        target_accuracy: 0 to 1, or None.
        eval_every: evaluate after so many epochs (with `steps`: steps); 0 means only at the end.
        train_size, test_size: samples used of each part.
        amp: "none" or "bf16".
        threads: threads per rank for tensor operations.
        straggler: a rank that is slow on purpose, as `Straggler` writes it; None: none is.
        bucket_mb: DDP's bucket size in MiB.
        warmup_steps: first steps that are trained but not timed.
        timeout_s: longest wait of one rank for another; a run in which no step ends for longer is stopped.
        profile: record so many steps as a Chrome trace on every rank.
        hosts, ranks_per_host: virtual hosts, or machines (`nnodes`), and ranks on each.
        cluster: virtual hosts and their links as `Cluster.to_dict` gives them, None without virtual hosts.
        uplink_bps, downlink_bps, latency_s: limits of the slowest virtual host's link, None where not limited.
        data_dir: where data sets lie.
    """

    name: str
    model: str
    dataset: str
    optimizer: str
    compressor: str
    collective: str
    strategy: str
    filled: dict[str, str]
    trigger: Trigger = "async"
    world_size: int = 2
    batch_size: int = 32
    epochs: int | None = None
    steps: int | None = None
    lr: float
    schedule: Schedule = "cosine"
    warmup_epochs: float = 0.0
    lr_scaling: Literal["none", "linear"] = "none"
    partition: Literal["iid"] = "iid"
    seed: int = 1
    target_accuracy: float | None = None
    eval_every: int = 1
    train_size: int
    test_size: int
    augment: bool = True
    amp: Literal["none", "bf16"] = "none"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    straggler: str | None = None
    bucket_mb: float = 25.0
    warmup_steps: int = 3
    nonfinite: Nonfinite = "skip"
    timeout_s: float = 300.0
    profile: int = 0
    save_model: bool = False
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    hosts: int = 1
    ranks_per_host: int
    cluster: dict[str, Any] | None = None
    uplink_bps: float | None = None
    downlink_bps: float | None = None
    latency_s: float | None = None
    data_dir: str

    def identity(self) -> dict[str, Any]:
        """What identifies the experiment: all fields but labels, places and observation, specs with their defaults."""
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k not in _NOT_IDENTITY}
        return fields | {name: self.filled[name] for name in _COMPONENTS}

    @property
    def digest(self) -> str:
        """Ten hex digits over `identity`."""
        return _digest(self.identity())

    @property
    def config_id(self) -> str:
        """The digest without the seed: equal for repeats of one configuration."""
        identity = self.identity()
        del identity["seed"]
        return _digest(identity)

    def columns(self) -> dict[str, Any]:
        """This run's identity columns for `metrics.csv`, all but `run_id`."""
        hidden = {
            "filled",
            "cluster",
            "data_dir",
            "nnodes",
            "node_rank",
            "rdzv_endpoint",
            "timeout_s",
            "profile",
            "save_model",
            "eval_every",
            "warmup_steps",
        }
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k not in hidden}
        return fields | {"digest": self.digest, "config_id": self.config_id}

    def to_json(self) -> str:
        """The configuration as JSON text, keys in declaration order."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, path: Path) -> Self:
        """Read what `to_json` wrote.

        Raises:
            UsageError: the file is not a run's configuration.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path} is not a run's config.json: {error}") from None


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]
