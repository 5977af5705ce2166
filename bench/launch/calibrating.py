"""From the options of `bench calibrate` to a checked measurement, and the processes that make it, start to end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from bench.core import spec
from bench.core.calibrate_config import CalibrateConfig
from bench.core.config import RunConfig
from bench.core.errors import UsageError
from bench.launch.fork_server import ForkServer
from bench.launch.measurement import measure
from bench.launch.resolve import prepare
from bench.launch.watchdog import WatchdogTimeouts

if TYPE_CHECKING:
    from bench.optimizers.base import Optimizer
    from compressors.base import Compressor

_OF_A_RUN = ("model", "dataset", "data_dir", "optimizer", "batch_size", "augment", "bucket_mb", "threads", "seed")


def resolve(asked: CalibrateConfig) -> CalibrateConfig:
    """The measurement with every default filled in; an absent data set is fetched.

    Raises:
        UsageError: something is unknown, or cannot be measured.
    """
    if asked.device == "cuda":
        raise UsageError("what a GPU takes cannot be calibrated; use --device cpu")
    optimizer = cast("Optimizer", spec.build("optimizers", asked.optimizer))
    if optimizer.exchanges:
        raise UsageError(
            f"{optimizer.component_name} exchanges something of its own, which is not part of the model; use another "
            "optimizer"
        )
    given = {name: getattr(asked, name) for name in _OF_A_RUN}
    (run,), _ = prepare(RunConfig(**given, world_size=1, device="cpu", steps=1), [asked.seed])
    return dataclasses.replace(
        asked,
        **{name: getattr(run, name) for name in _OF_A_RUN},
        device="cpu",
        compressors=",".join(_measurable(text) for text in spec.split_list(asked.compressors)),
    )


def execute(config: CalibrateConfig, tell: Callable[[str], None], server: ForkServer) -> dict[str, Any]:
    """Measure, and return what was found as plain values, as `Calibration` has them.

    Args:
        config: from `resolve`.
        tell: is told what comes next.
        server: starts the processes; made with `fork_server.CALIBRATE`.

    Raises:
        RunFailed: a process failed or hung; its log is kept and named.
        Interrupted: the user stopped it.
    """
    found: dict[str, Any] = {}

    def take(report: Any) -> None:
        if "measuring" in report:
            tell(report["measuring"])
        found.update(report.get("calibration", {}))

    measure(
        "calibrate",
        config,
        lambda folder: server.start(folder, num_ranks=2, threads=config.threads, device=config.device),
        WatchdogTimeouts.with_one_process(config.timeout_s),
        take,
    )
    return found


def _measurable(text: str) -> str:
    compressor = cast("Compressor", spec.build("compressors", text))
    if compressor.engine_hook:
        raise UsageError(f"{text} encodes inside PyTorch's own hook, out of sight; leave it out")
    return spec.short_text(compressor)
