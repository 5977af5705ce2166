"""Check the options of `bench calibrate`, run the measurements, and keep finished results after an interruption."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bench.core import environment, processes, spec
from bench.core.config.run import RanksConfig, RunConfig
from bench.core.environment import usable_cores
from bench.core.errors import Interrupted, RunFailed, UsageError
from bench.core.files import check_writable
from bench.core.run_folder import read_json, write_json
from bench.core.units import parse_duration
from bench.extensions.predict.calibration import FORWARDED, FRAMES, LOCAL, SEGMENTS, VERSION, Calibration
from bench.extensions.predict.options import CalibrateConfig
from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.support import choose_backend, hosts_supported
from bench.launch.jobs.failure import WatchdogTimeouts
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.plan import check as check_run
from bench.launch.plan import plan as plan_run
from bench.launch.plan import prepare_data
from bench.launch.run import measure
from collectives.options import raise_first

if TYPE_CHECKING:
    from bench.optimizers.base import Optimizer
    from compressors.base import Compressor


def cannot_be_calibrated(compressor: Compressor) -> str | None:
    """Return a sentence that says why a compressor's work cannot be measured on one rank; None if it is measurable."""
    from compressors.base import DdpHook, MultiRound

    text = str(compressor)
    obstacles = (
        (isinstance(compressor, DdpHook), "works through DDP's own hook, which cannot be timed alone; leave it out"),
        (
            compressor.traits.needs_all_ranks and not isinstance(compressor, MultiRound),
            "makes the ranks communicate before they encode, which cannot be predicted; use other options",
        ),
        (
            compressor.traits.one_bucket,
            "needs the whole model as one bucket, but the other compressors are measured with several; use other "
            "options",
        ),
    )
    return next((f"{text} {reason}" for applies, reason in obstacles if applies), None)


def denser_epochs(text: str) -> int:
    """Return the number of epochs at the start in which a compressor sends more than later, from its spec text."""
    return cast("Compressor", spec.build("compressors", text)).traits.denser_epochs


WORKER = "bench.extensions.predict.calibration_worker"
FORWARDING = "bench.extensions.predict.message_costs"
# Number of ranks per core when several ranks compute at once, and the largest number of ranks in this measurement.
CROWDED = 2
MOST_AT_ONCE = 16
# Links on which messages are measured, by how frames travel. The links of the forwarder (the process that forwards
# frames) are together faster than the forwarder, so that it is nearly always busy: only then does its CPU time per byte
# matter. They are at most twice as fast, because the forwarder needs less time per byte when it handles many frames at
# once.
LINKS = {
    FRAMES: HostLink(name="host", uplink_bps=100e6, downlink_bps=100e6),
    SEGMENTS: HostLink(name="host", uplink_bps=1e9, downlink_bps=1e9),
    FORWARDED: HostLink(name="host", uplink_bps=400e6, downlink_bps=400e6, latency_s=1e-3),
}

# Seconds of the budget that are reserved for starting processes and ending the command.
OUTSIDE_S = 10.0
# Expected seconds to measure messages of one kind between virtual hosts.
HOSTS_S = 20.0
# Options that the calibration records.
_AS_GIVEN = ("model", "dataset", "optimizer", "batch_size", "augment", "threads", "bucket_mb")
# Options that may differ between an interrupted calibration and the command that continues it.
_MAY_DIFFER = ("data_dir", "timeout_s", "compressors", "virtual_hosts", "left_s", "done", "later")
# Options that `RunConfig` has too.
_OF_A_RUN = ("model", "dataset", "data_dir", "optimizer", "batch_size", "augment", "bucket_mb", "threads", "seed")


def check(options: CalibrateConfig) -> RunConfig:
    """Check the options of `bench calibrate`, and return the configuration of a run that trains the same model.

    Raises:
        UsageError: an option is unknown, or names a device, optimizer or compressor that cannot be measured.
    """
    optimizer = cast("Optimizer", spec.build("optimizers", options.optimizer))
    raise_first(
        UsageError,
        (options.device == "cuda", "GPUs cannot be calibrated; use --device cpu"),
        (
            optimizer.exchanges,
            f"{optimizer.component_name} exchanges data itself, which predictions do not cover; use another optimizer",
        ),
    )
    given = {name: getattr(options, name) for name in _OF_A_RUN}
    run = check_run(RunConfig(**given, world_size=1, device="cpu", steps=1))
    compressors = [cast("Compressor", spec.build("compressors", text)) for text in spec.split_list(options.compressors)]
    raise_first(UsageError, *((True, reason) for reason in map(cannot_be_calibrated, compressors) if reason))
    return run


def resolve(options: CalibrateConfig) -> CalibrateConfig:
    """Return the options of `bench calibrate` with all defaults filled in; download the data set if it is missing.

    Raises:
        UsageError: an option is unknown, or names a device, optimizer or compressor that cannot be measured.
    """
    run = plan_run(check(options))
    prepare_data(run.dataset, run.data_dir)
    return dataclasses.replace(
        options,
        **{name: getattr(run, name) for name in _OF_A_RUN},
        device="cpu",
        compressors=",".join(str(spec.build("compressors", text)) for text in spec.split_list(options.compressors)),
    )


def execute(config: CalibrateConfig, tell: Callable[[str], None], server: ForkServer, kept: KeptParts) -> Calibration:
    """Run all measurements of a calibration that are not in `kept`, and return the calibration.

    Args:
        config: the complete options, as `resolve` returns them.
        tell: called with a line of text before each measurement.
        server: starts the processes; must have been created for the module `WORKER`.
        kept: results of measurements that were made before; each new result is added.

    Raises:
        RunFailed: a process failed or hung; the message names the log of this process.
        Interrupted: the user stopped the measurement.
    """
    try:
        with processes.interruptible():
            _measure_parts(config, tell, server, kept)
    except (Interrupted, RunFailed) as error:
        reason = "stopped by the user" if isinstance(error, Interrupted) else error
        raise type(error)(f"{reason}; {kept.said}") from None
    return kept.calibration(config)


def _measure_parts(config: CalibrateConfig, tell: Callable[[str], None], server: ForkServer, kept: KeptParts) -> None:
    took_s = math.fsum(part["seconds"] for part in kept.parts.values())
    ends = time.monotonic() + parse_duration(config.budget) - OUTSIDE_S - took_s
    clusters: dict[str, tuple[str, Cluster]] = {}  # by name of the measurement: how frames travel, and the hosts
    for path, link in LINKS.items() if config.virtual_hosts and hosts_supported()[0] else ():
        hosts = tuple(dataclasses.replace(link, name=f"host{index}") for index in range(_at_once(threads=1)))
        with contextlib.suppress(UsageError):  # this machine cannot delay frames
            cluster = choose_backend(Cluster(hosts=hosts))
            if cluster.forwarded == (path == FORWARDED):
                clusters[f"messages between virtual hosts, {path}"] = path, cluster

    def say(number: int, of: int, text: str, left_s: float | None) -> None:
        left = ""
        if left_s is not None:  # rounded to 5 s, or to whole minutes from two minutes on
            rounded = f"{round(left_s / 60)} min" if left_s >= 120 else f"{max(5, 5 * round(left_s / 5))} s"
            left = f", about {rounded} left"
        tell(f"[{number}/{of}] {text}{left}")

    def take(report: Mapping[str, Any]) -> None:
        if "measuring" in report:
            say(report["number"], report["of"], report["measuring"], report["left_s"])
        if "part" in report:
            kept.add(report)

    num_ranks = _at_once(config.threads)
    job = dataclasses.replace(
        config, left_s=max(0.0, ends - time.monotonic()), done=tuple(kept.parts), later=tuple(clusters)
    )
    measure(
        "calibrate",
        job,
        lambda folder: server.start(folder, num_ranks=num_ranks, threads=config.threads, device=config.device),
        WatchdogTimeouts(first_s=config.timeout_s, next_s=config.timeout_s),
        take,
    )
    left = [text for text in clusters if text not in kept.parts]
    number = len(kept.parts)
    for done, text in enumerate(left):
        say(number + done + 1, number + len(left), text, HOSTS_S * (len(left) - done))
        path, cluster = clusters[text]
        kept.add({"part": text, "found": {"messages": {path: _messages(config, cluster, server)}}})


class KeptParts:
    """Results of a calibration's finished measurements, kept in a file so that `bench calibrate` can be resumed.

    Args:
        out: file to which the calibration will be written.
        config: the complete options, as `resolve` returns them; results that were measured with other options are
            ignored.

    Attributes:
        path: the file of the results, `out` with ".parts" appended.
        parts: the report of each finished measurement, by the measurement's name.
    """

    def __init__(self, out: Path, config: CalibrateConfig) -> None:
        self.path = out.with_name(f"{out.name}.parts")
        check_writable(self.path)
        origin = _origin() | {key: value for key, value in dataclasses.asdict(config).items() if key not in _MAY_DIFFER}
        self._of = json.loads(json.dumps(origin))
        self.parts = self._written()
        self._since = time.monotonic()

    @property
    def said(self) -> str:
        """Return a sentence for an error message: how many measurements are kept, and how to continue."""
        written = self._written()  # a signal may have come before the last part was written
        if not written:
            return "no part was measured yet"
        return f"{len(written)} part(s) are kept in {self.path}; run the same command again to continue from there"

    def add(self, report: Mapping[str, Any]) -> None:
        """Add the report of a measurement, with the seconds since the previous report, and write the file."""
        now = time.monotonic()
        self.parts[report["part"]] = {**report, "seconds": now - self._since}
        self._since = now
        write_json(self.path, {"of": self._of, "parts": self.parts})

    def _written(self) -> dict[str, dict[str, Any]]:
        kept = read_json(self.path) or {}
        return kept.get("parts", {}) if kept.get("of") == self._of else {}

    def calibration(self, config: CalibrateConfig) -> Calibration:
        """Return the calibration that consists of the results of all measurements.

        The calibration's field `cut` has a text like "12 of 36 steps of several ranks at once" for each measurement
        that was repeated less often than planned for lack of time.
        """
        found: dict[str, list[Any]] = collections.defaultdict(list)
        made, full = collections.Counter[str](), collections.Counter[str]()
        for part in self.parts.values():
            for name, value in part["found"].items():
                found[name].append(value)
            for name, repetitions, planned in part.get("counts", []):
                made[name] += repetitions
                full[name] += planned
        times = itertools.chain.from_iterable(found["times"])
        batch_s, forward_s, backward_s, update_s, *ready = map(statistics.median, zip(*times, strict=True))
        (buckets,), (among_steps_s,), (later_s,) = found["buckets"], found["among_steps_s"], found["later_s"]
        messages, encoded, first_epoch = (
            {key: value for of_part in found[name] for key, value in of_part.items()}
            for name in ("messages", "encoded", "first_epoch")
        )
        return Calibration.of(
            {
                **_origin(),
                **{name: getattr(config, name) for name in _AS_GIVEN},
                "batch_s": batch_s,
                "forward_s": forward_s,
                "backward_s": backward_s,
                "update_s": update_s,
                "buckets": [bucket | {"ready_s": at} for bucket, at in zip(buckets, ready, strict=True)],
                "encoded": {text: encoded[text] for text in spec.split_list(config.compressors)},
                "first_epoch": {text: each for text, each in first_epoch.items() if text in encoded},
                "crowds": [  # means over several rounds, for each number of ranks
                    {
                        "load": crowds[0]["load"],
                        "handed_over_s": [
                            statistics.fmean(at) for at in zip(*(each["handed_over_s"] for each in crowds), strict=True)
                        ],
                        "computed_s": statistics.fmean(each["computed_s"] for each in crowds),
                        "cpu_s": statistics.fmean(each["cpu_s"] for each in crowds),
                    }
                    for crowds in zip(*itertools.chain.from_iterable(found["crowds"]), strict=True)
                ],
                "messages": messages,
                "around_message_s": max(0.0, among_steps_s - messages[LOCAL]["message_s"]),
                "crowded_wake_s": max(0.0, statistics.fmean(later_s)),
                "cut": [f"{made[name]} of {full[name]} {name}" for name in full if made[name] < full[name]],
            }
        )


def _origin() -> dict[str, Any]:
    """Return the fields of a calibration that describe this machine and its software."""
    return {
        "version": VERSION,
        "cpu": environment.cpu_model(),
        "cores": usable_cores(),
        "torch_version": environment.version_of("torch"),
        "kernels": environment.kernels(),
    }


def _at_once(threads: int) -> int:
    return max(2, min(MOST_AT_ONCE, CROWDED * usable_cores() // threads))


def _messages(config: CalibrateConfig, cluster: Cluster, server: ForkServer) -> dict[str, float]:
    costs: dict[str, float] = {}
    job = RanksConfig(
        seed=config.seed,
        timeout_s=config.timeout_s,
        device="cpu",
        world_size=len(cluster.hosts),
        threads=1,
        cluster=cluster.to_dict(),
        **cluster.columns(),
    )
    measure(
        "calibrate",
        job,
        lambda folder: server.start(
            folder,
            num_ranks=job.world_size,
            threads=job.threads,
            device=job.device,
            network=server.network(cluster),
            module=FORWARDING,
        ),
        WatchdogTimeouts.with_job(job),
        lambda report: costs.update(report.get("messages", {})),
    )
    return costs
