"""`bench doctor`, which checks whether this machine can execute runs, and whether its measurements will be reliable.

Each check yields one line: what it found and, if something is wrong, what to do.
"""

import dataclasses
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from rich.markup import escape

from bench.cli.console import print_json, stdout_console
from bench.core import environment, registry
from bench.core.config.run import DATA_DIR, MAX_RANKS, RunConfig
from bench.core.environment import PACKAGES, cpu_quota, usable_cores, version_of
from bench.core.errors import BenchError, Interrupted, RunFailed, UsageError
from bench.core.run_folder import RUNS_FOLDER
from bench.core.units import format_bytes, format_rate
from bench.core.waiting import waiting
from bench.hosts import support
from bench.hosts.virtual_network import forwarded_bps
from bench.launch.jobs.failure import noted
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.plan import plan
from bench.launch.run import execute
from collectives.kernels import library
from collectives.options import OptionError, Options

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
EXAMPLES = """[bold]Examples[/bold]

  bench doctor

  bench doctor --world-size 8 --no-smoke

  bench doctor --json"""


def doctor(
    world_size: Annotated[
        int, typer.Option(min=1, max=MAX_RANKS, help="Number of ranks that you want to run on this machine.")
    ] = 2,
    out: Annotated[Path, typer.Option(help="Folder of results.")] = RUNS_FOLDER,
    data_dir: Annotated[Path, typer.Option(help="Folder of the data sets.")] = Path(DATA_DIR),
    smoke: Annotated[bool, typer.Option(help="Train a few steps on two real ranks.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Check versions, backends, cores, memory, data, disk and permissions, and train a few steps on two ranks."""
    console = stdout_console()
    checks = []
    for check in examine(world_size=world_size, out=out, data_dir=data_dir, smoke=smoke):
        checks.append(check)
        waiting.doing(f"checked {check.name}")
        if not as_json:
            level = f"[{COLOURS[check.level]}]{check.level:4}[/]"
            text = "; ".join(filter(None, (check.finding, check.fix)))
            console.print(f"{level}  [bold]{check.name}[/]: {escape(text)}", soft_wrap=True)
    if as_json:
        print_json([dataclasses.asdict(check) for check in checks])
    if failed := [check.name for check in checks if check.level == "fail"]:
        raise RunFailed(
            f"{len(failed)} of {len(checks)} checks failed ({', '.join(failed)}); the lines above say what to do"
        )


Level = Literal["ok", "warn", "fail"]

LITTLE_DISK_BYTES = 1_000_000_000
NO_DISK_BYTES = 20_000_000
LITTLE_SHARED_BYTES = 100_000_000
BUSY_SHARE = 0.5  # share of the cores that may be busy without a warning
# The smoke test.
SMOKE_RANKS = 2
SMOKE_STEPS = 3
SMOKE_THREADS = 1


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        level: "fail" if runs cannot work; "warn" if runs work, but something is missing or measurements will be
            unreliable; "ok" otherwise.
        name: the subject of the check.
        finding: what the check found.
        fix: what the user can do; empty if nothing is wrong.
    """

    level: Level
    name: str
    finding: str
    fix: str = ""


def examine(*, world_size: int, out: Path, data_dir: Path, smoke: bool) -> Iterator[Check]:
    """Run all checks, and yield each result as soon as it is known.

    Args:
        world_size: number of ranks that the user wants to run on this machine.
        out: folder of results.
        data_dir: folder of data sets.
        smoke: also measure the links of virtual hosts, and train a few steps on two real ranks (some seconds).

    Raises:
        Interrupted: the user stopped the training.
    """
    with ForkServer(TRAIN) as server:
        if smoke:
            server.warm_up(SMOKE_THREADS)
        yield versions()
        yield kernels()
        yield cores(world_size)
        yield load()
        yield results_folder(out)
        yield disk(out)
        hosts = namespaces()
        yield hosts
        if hosts.level == "ok":
            yield links(measure=smoke)
        torch = backends()
        yield torch
        if torch.level != "fail":  # the other checks need torch
            yield shared_memory(Path("/dev/shm"))
            yield dax(Path("/sys"))
            yield cache_lines()
            yield from data_sets(data_dir)
            if smoke:
                yield smoke_test(data_dir, server)


def cores(world_size: int) -> Check:
    """Check that each rank can have its own core, also within the CPU quota of a container."""
    usable, quota = usable_cores(), cpu_quota()
    by_quota = f" (the CPU quota is {quota:.3g} cores)" if quota is not None else ""
    if world_size <= usable:
        return Check("ok", "cores", f"{usable} cores for {world_size} ranks{by_quota}")
    finding = (
        f"{world_size} ranks share {usable} cores{by_quota}, so step times depend on the sharing as well as on the "
        "method"
    )
    return Check("warn", "cores", finding, f"use --world-size {usable} or fewer if times matter")


def versions() -> Check:
    """Check that the packages that runs need are installed."""
    found = {package: version_of(package) for package in PACKAGES}
    if missing := [package for package, version in found.items() if not version]:
        return Check("fail", "versions", f"not installed: {', '.join(missing)}", "run `make setup` in the checkout")
    listed = [f"{package} {version}" for package, version in found.items()]
    return Check("ok", "versions", ", ".join([f"Python {platform.python_version()}", *listed]))


def kernels() -> Check:
    """Check that compiled loops are available: in C for the CPU, and in Triton for GPUs."""
    reason, missing = library.found().finding, library.triton_missing()
    on_gpus = f"the reference path: {missing}" if missing else f"Triton {environment.version_of('triton')}"
    if environment.kernels() == "native":
        return Check("ok", "kernels", f"native loops, {reason}; on GPUs {on_gpus}")
    used = "the reference path is used, which gives the same numbers but is many times slower"
    finding = f"{used}: {reason}" + ("" if missing == reason else f"; on GPUs {on_gpus}")
    fix = f"unset {library.VARIABLE}" if library.VARIABLE in os.environ else "run `make setup` in the checkout"
    return Check("warn", "kernels", finding, fix)


def load() -> Check:
    """Check that no other programs keep the cores busy."""
    busy = os.getloadavg()[0]
    if busy <= BUSY_SHARE * usable_cores():
        return Check("ok", "load", f"{busy:.1f} busy tasks in the last minute")
    return Check(
        "warn",
        "load",
        f"{busy:.1f} busy tasks in the last minute, so times will be noisy",
        "wait until they end, or trust only bytes and accuracy",
    )


def results_folder(out: Path) -> Check:
    """Check that a run can create its folder in the folder of results."""
    parent = _nearest_existing(out)
    try:
        with tempfile.TemporaryFile(dir=parent) as probe:
            probe.write(b"bench")
            probe.flush()
    except OSError as error:
        return Check(
            "fail",
            "results",
            f"{out} cannot be written: {error.strerror or error} ({parent})",
            "choose another folder with --out",
        )
    return Check("ok", "results", f"{out} can be written")


def disk(out: Path) -> Check:
    """Check that there is enough disk space for rows, logs and data sets."""
    free = shutil.disk_usage(_nearest_existing(out)).free
    level: Level = "ok" if free >= LITTLE_DISK_BYTES else "warn" if free >= NO_DISK_BYTES else "fail"
    fix = "" if level == "ok" else "free some space, or choose another --out"
    return Check(level, "disk", f"{format_bytes(free)} free for {out}", fix)


def namespaces() -> Check:
    """Check that this machine supports virtual hosts."""
    supported, reason = support.hosts_supported()
    return (
        Check("ok", "virtual hosts", "network namespaces are permitted")
        if supported
        else Check("warn", "virtual hosts", reason, "needed only for limited links; everything else works without them")
    )


def links(*, measure: bool) -> Check:
    """Check that the kernel or the forwarder can give the links of virtual hosts delays, losses and varying rates.

    The forwarder is a process of this project that passes frames on.

    Args:
        measure: also measure how many bit/s the forwarder can carry.
    """
    (by_kernel, no_netem), (by_forwarder, no_forwarder) = support.netem_supported(), support.forwarder_supported()
    ours = "jitter and traces" if by_kernel else "latency, jitter, loss and traces"
    if not by_forwarder:
        reasons = "; ".join(filter(None, (no_forwarder, no_netem)))
        return Check("warn", "links", reasons, f"needed only for {ours} of virtual hosts' links")
    finding = f"{'latency and loss by the kernel, ' if by_kernel else ''}{ours} by the forwarder"
    if not measure:
        return Check("ok", "links", finding)
    try:
        return Check("ok", "links", f"{finding}, which carries {format_rate(forwarded_bps())} over all links")
    except (UsageError, RunFailed) as error:
        return Check("warn", "links", f"the forwarder does not work: {error}", f"needed only for {ours}")


def backends() -> Check:
    """Check that torch can be imported and has gloo; report NCCL and GPUs."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return Check("fail", "backends", f"torch cannot be imported: {error}", "install it with `make setup`")
    if not (dist.is_available() and dist.is_gloo_available()):
        return Check(
            "fail",
            "backends",
            "this build of torch has no gloo, which every run on a CPU needs",
            "install an official build of torch with `make setup`",
        )
    gpus = "no GPU, so ranks compute on the CPU"
    if torch.cuda.is_available():
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return Check("ok", "backends", f"{'gloo and nccl' if dist.is_nccl_available() else 'gloo'}; {gpus}")


def shared_memory(folder: Path) -> Check:
    """Check that ranks on this machine can share memory by files in a folder.

    Args:
        folder: a folder in memory, such as ``/dev/shm``.
    """
    fix = "needed only for the collective pool; give it another folder with pool:path=FOLDER"
    if not os.access(folder, os.W_OK):
        return Check("warn", "shared memory", f"{folder} is not a folder that can be written", fix)
    free = shutil.disk_usage(folder).free
    level: Level = "warn" if free < LITTLE_SHARED_BYTES else "ok"
    return Check(level, "shared memory", f"{format_bytes(free)} free in {folder}", "" if level == "ok" else fix)


def dax(sysfs: Path) -> Check:
    """List the DAX devices of this machine, such as CXL memory, which the collective `pool` can map.

    Args:
        sysfs: the folder where the kernel describes devices, ``/sys``.
    """
    from collectives.transport.memory_region import dax_devices  # imports torch

    found = [
        f"{device.path} of {format_bytes(device.nbytes)} in units of {device.alignment // 1024} KiB"
        for device in dax_devices(sysfs)
    ]
    return Check("ok", "DAX", ", ".join(found) or "no DAX device")


def cache_lines() -> Check:
    """Check that the collective `pool` can flush cache lines.

    `pool` needs to flush them if it uses memory in which ranks do not see each other's stores.
    """
    from collectives.transport import mapped_memory  # imports torch

    order = "stores are seen in order" if mapped_memory.stores_are_ordered() else "stores need fences"
    try:
        mapped_memory.cache_lines()
    except (OptionError, OSError) as error:
        needed = "only for pool:coherent=false" if mapped_memory.stores_are_ordered() else "for the collective pool"
        return Check("warn", "cache lines", f"{order}; {error}", f"needed {needed}")
    return Check("ok", "cache lines", f"{order}, and the helper that flushes cache lines is built")


def data_sets(data_dir: Path) -> Iterator[Check]:
    """Check for each data set that it can be loaded."""
    from bench.datasets.base import Dataset  # imports torch

    def look(component: type[Options]) -> Check:
        dataset = cast(Dataset, component())
        name, status = f"data: {dataset.component_name}", dataset.status(data_dir)
        is_ready = dataset.is_present(data_dir)
        return Check("ok", name, status) if is_ready else Check("warn", name, status, "needed only to train on it")

    yield from registry.ask_each("datasets", look).values()


def smoke_test(data_dir: Path, server: ForkServer) -> Check:
    """Train a few steps in a real run of two ranks, and keep the run's folder only if it fails.

    Args:
        data_dir: folder of data sets.
        server: starts the ranks.

    Raises:
        Interrupted: the user stopped the training.
    """
    options = RunConfig(
        name="doctor",
        model="linear",
        dataset="digits",
        world_size=SMOKE_RANKS,
        steps=SMOKE_STEPS,
        train_size=128,
        test_size=64,
        device="cpu",
        threads=SMOKE_THREADS,
        timeout_s=100.0,
        data_dir=str(data_dir),
    )
    folder = Path(tempfile.mkdtemp(prefix="bench-doctor-"))
    try:
        with noted("doctor", folder):
            result = execute(plan(options), folder, lambda report: None, server)
    except BenchError as error:
        shutil.rmtree(folder)
        return Check("fail", "smoke", str(error), "fix what the other lines name")
    if result.status not in ("ok", "interrupted"):
        return Check("fail", "smoke", result.error, f"see the logs in {result.folder.logs}")
    shutil.rmtree(folder)
    if result.status == "interrupted":
        raise Interrupted("stopped during the smoke test")
    return Check("ok", "smoke", f"{SMOKE_RANKS} ranks trained {SMOKE_STEPS} steps")


def _nearest_existing(path: Path) -> Path:  # the path itself, or the nearest folder above it that exists
    return next(candidate for candidate in (path.absolute(), *path.absolute().parents) if candidate.exists())
