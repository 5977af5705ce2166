"""Types of the keywords of `bench.run`, written by `python -m bench.cli.reference_pages`; edit the options instead."""

from typing import Literal, TypedDict

class RunOptions(TypedDict, total=False):
    """Options of `bench run`, except the compressor, which can be several."""

    recipe: str | None
    model: str
    dataset: str
    optimizer: str
    batch_size: int | None
    accumulate: int
    epochs: int | None
    steps: int | None
    lr: float | None
    schedule: Literal["constant", "cosine", "step"]
    warmup_epochs: float
    lr_scaling: str | None
    clip_norm: float | None
    label_smoothing: float
    augment: bool
    amp: Literal["none", "bf16"]
    train_size: int | None
    test_size: int | None
    holdout_size: int
    data_dir: str
    partition: str
    collective: str | None
    strategy: str
    trigger: Literal["async", "sync"]
    bucket_mb: float | None
    nonfinite: Literal["skip", "raise", "zero"]
    device: Literal["auto", "cpu", "cuda"]
    timeout: float
    world_size: int | None
    threads: int | None
    straggler: str | None
    max_restarts: int
    nnodes: int
    node_rank: int
    rdzv_endpoint: str | None
    hosts: int | None
    ranks_per_host: int | None
    network: str | None
    bandwidth: str | None
    uplink: str | None
    downlink: str | None
    bandwidth_trace: str | None
    uplink_trace: str | None
    downlink_trace: str | None
    latency: str | None
    jitter: str | None
    loss: str | None
    cluster: str | None
    seed: int
    target_accuracy: float | None
    target_bits_per_byte: float | None
    stop_at_target: bool
    eval_every: float | None
    warmup_steps: int
    rates_tried: int
    profile: int
    name: str | None
    checkpoint_every: int
    save_model: bool
    track: Literal["none", "tensorboard", "mlflow"]
