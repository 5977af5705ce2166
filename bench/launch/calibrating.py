"""From the options of `bench calibrate` to a checked measurement, and the processes that make it, start to end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from bench.core import spec
from bench.core.config.calibrate import CalibrateConfig
from bench.core.config.job import RanksConfig
from bench.core.config.run import RunConfig
from bench.core.environment import usable_cores
from bench.core.errors import UsageError
from bench.core.parts import FORWARDED, FRAMES, SEGMENTS
from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.support import hosts_supported
from bench.hosts.ways import settle
from bench.launch.jobs import torchrun
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.jobs.watchdog import WatchdogTimeouts
from bench.launch.measurement import measure
from bench.launch.predictions.measurable import cannot_be_calibrated
from bench.launch.resolve import check as check_run
from bench.launch.resolve import prepare

if TYPE_CHECKING:
    from bench.optimizers.base import Optimizer
    from compressors.base import Compressor

CARRYING = "bench.micro.carrying_worker"
CROWDED = 2
"""ranks on every core, of those that compute at once"""
MOST_AT_ONCE = 16
# Rates at which each way is used; those of the forwarder are together more than it carries, yet no more than twice, for
# what it takes for a byte decides only where it has little rest, and it takes less where it handles many at once.
LINKS = {
    FRAMES: HostLink(name="host", uplink_bps=100e6, downlink_bps=100e6),
    SEGMENTS: HostLink(name="host", uplink_bps=1e9, downlink_bps=1e9),
    FORWARDED: HostLink(name="host", uplink_bps=400e6, downlink_bps=400e6, latency_s=1e-3),
}

_OF_A_RUN = ("model", "dataset", "data_dir", "optimizer", "batch_size", "augment", "bucket_mb", "threads", "seed")


def check(asked: CalibrateConfig) -> RunConfig:
    """Return a run of what is to be measured.

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
    run = RunConfig(**given, world_size=1, device="cpu", steps=1)
    check_run(run)
    for text in spec.split_list(asked.compressors):
        _measurable(text)
    return run


def resolve(asked: CalibrateConfig) -> CalibrateConfig:
    """The measurement with every default filled in; an absent data set is fetched.

    Raises:
        UsageError: something is unknown, or cannot be measured.
    """
    (run,), _ = prepare(check(asked), [asked.seed])
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

    num_ranks = _at_once(config.threads)
    measure(
        "calibrate",
        config,
        lambda folder: server.start(folder, num_ranks=num_ranks, threads=config.threads, device=config.device),
        WatchdogTimeouts.with_one_process(config.timeout_s),
        take,
    )
    found["messages"] |= _between_hosts(config, tell)
    return found


def _at_once(threads: int) -> int:
    """Ranks that compute at once, each with so many threads."""
    return max(2, min(MOST_AT_ONCE, CROWDED * usable_cores() // threads))


def _between_hosts(config: CalibrateConfig, tell: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """What messages cost on virtual hosts, by what their network is made of; nothing where there are none here."""
    if not (config.virtual_hosts and hosts_supported()[0]):
        return {}
    found: dict[str, dict[str, float]] = {}
    for way, link in LINKS.items():
        hosts = tuple(dataclasses.replace(link, name=f"host{index}") for index in range(_at_once(threads=1)))
        with contextlib.suppress(UsageError):  # nothing here can delay frames
            cluster = settle(Cluster(hosts=hosts))
            if cluster.forwarded == (way == FORWARDED):
                tell(f"messages between virtual hosts, {way}")
                found[way] = _messages(config, cluster)
    return found


def _messages(config: CalibrateConfig, cluster: Cluster) -> dict[str, float]:
    costs: dict[str, float] = {}
    job = RanksConfig(
        seed=config.seed,
        timeout_s=config.timeout_s,
        world_size=len(cluster.hosts),
        threads=1,
        cluster=cluster.to_dict(),
        **cluster.columns(),
    )
    measure(
        "calibrate",
        job,
        lambda folder: torchrun.start_on_hosts(job, cluster, folder, CARRYING),
        WatchdogTimeouts.with_job(job),
        lambda report: costs.update(report.get("messages", {})),
    )
    return costs


def _measurable(text: str) -> str:
    compressor = cast("Compressor", spec.build("compressors", text))
    if reason := cannot_be_calibrated(compressor):
        raise UsageError(reason)
    return spec.short_text(compressor)
