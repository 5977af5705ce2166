"""Request: a run as the user asks for it, every default of `bench run` in one place."""

from __future__ import annotations

import dataclasses
from typing import Literal

from bench.core.config import Nonfinite, Schedule, Trigger

DEFAULT_EPOCHS = 20
DEFAULT_WORLD_SIZE = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostsRequest:
    """Where ranks shall run, as the user asks for it.

    Attributes:
        world_size: None: 2, or with virtual hosts all their ranks.
        device: "auto": GPUs where torch sees enough of them.
        threads: None: this machine's cores divided by its ranks, at least 1.
        hosts, ranks_per_host, network, bandwidth, uplink, downlink, latency, jitter, loss, cluster: virtual hosts, in
            the words of the command line; all None: none.
    """

    world_size: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    hosts: int | None = None
    ranks_per_host: int | None = None
    network: str | None = None
    bandwidth: str | None = None
    uplink: str | None = None
    downlink: str | None = None
    latency: str | None = None
    jitter: str | None = None
    loss: str | None = None
    cluster: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(HostsRequest):
    """What `bench run` was given; None means "choose for me". `RunConfig` has the same field names and explains them.

    Attributes:
        collective: None: the first of the strategy's own choices that takes what the compressor emits.
        epochs: None with `steps` also None: 20.
        lr: None: the optimizer's own default.
        train_size, test_size: None: the whole part.
    """

    name: str | None = None
    model: str = "small_cnn"
    dataset: str = "digits"
    optimizer: str = "sgd"
    compressor: str = "none"
    collective: str | None = None
    strategy: str = "ddp"
    trigger: Trigger = "async"
    batch_size: int = 32
    epochs: int | None = None
    steps: int | None = None
    lr: float | None = None
    schedule: Schedule = "cosine"
    warmup_epochs: float = 0.0
    lr_scaling: Literal["none", "linear"] = "none"
    seed: int = 1
    target_accuracy: float | None = None
    eval_every: int | None = None
    train_size: int | None = None
    test_size: int | None = None
    augment: bool = True
    amp: Literal["none", "bf16"] = "none"
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
    data_dir: str = "data"
