"""Functions that every rank process uses: main function, device, scheduling, process group, error file, exit."""

import contextlib
import ctypes
import datetime
import importlib
import os
import platform
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from bench.core.config.configuration import Configuration
from bench.core.config.run import RanksConfig
from bench.core.processes import die_with_parent, own_rank
from bench.core.run_folder import RunFolder, read_json, write_json
from collectives.transport.base import TransportError
from collectives.transport.failure_detector import failure_detector
from collectives.transport.process_group import backend_failure

_OF_LINKS = ("measured_bandwidth_bps", "measured_rtt_s", "measured_loss_ratio", "wire_headers")


def link_columns(folder: RunFolder) -> dict[str, Any]:
    """Return the values of the columns about links between virtual hosts, measured before training, by column name.

    Without virtual hosts, all values are empty.
    """
    measured = read_json(folder.link) or {}
    return {name: measured.get(name) for name in _OF_LINKS} | {"link_warnings": "; ".join(measured.get("warnings", ()))}


def link_rates(config: RanksConfig) -> tuple[float, ...]:
    """Return the rate of each rank's link in bits per second, in rank order; empty if any host's rate is unknown.

    A host's rate is that of its slower direction (of a trace: the mean over time); its ranks share it equally.
    """
    of_hosts = []
    for host in config.cluster["hosts"] if config.cluster else ():
        traces = (host["uplink_trace"], host["downlink_trace"])
        rates = [host["uplink_bps"], host["downlink_bps"], *(trace["mean_bps"] for trace in traces if trace)]
        of_hosts.append(min((rate for rate in rates if rate), default=0.0) / config.ranks_per_host)
    return tuple(rate for rate in of_hosts for _ in range(config.ranks_per_host)) if all(of_hosts) else ()


DYNAMO = "torch._dynamo"


class Postponed(ModuleType):
    """A stand-in for a module with a few attributes; access to any other attribute imports the real module.

    Args:
        name: name of the real module.
        answers: the stand-in's attributes.
    """

    def __init__(self, name: str, **answers: Any) -> None:
        super().__init__(name)
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        if isinstance(sys.modules[DYNAMO], Postponed):
            del sys.modules[DYNAMO]
        return getattr(importlib.import_module(self.__name__), name)


def postpone_compiler() -> None:
    """Make this process import torch's compiler, `torch._dynamo`, only when it is needed.

    This must be called after the process group has been made.
    """
    utils = Postponed(f"{DYNAMO}.utils", get_optimize_ddp_mode=lambda: "no_optimization")
    compiler = Postponed(DYNAMO, utils=utils, graph_break=lambda: None, disable=lambda function, *_, **__: function)
    sys.modules.setdefault(DYNAMO, compiler)


C = TypeVar("C", bound=Configuration)
# Environment variable with the process group's init method; if it is not set, torchrun connects the ranks.
INIT_METHOD = "BENCH_INIT_METHOD"
# Texts in plain RuntimeErrors of gloo and of a file store that mean that a rank was lost.
_WORDS_OF_A_LOSS = ("connectFullMesh", "Wait timeout")


def rank_main(
    configuration: type[C], work: Callable[[C, RunFolder], None], user_errors: tuple[type[Exception], ...]
) -> Callable[[str], int]:
    """Return a rank's main function, which takes the path of the job's folder and returns the exit code.

    The exit code is 0 after success, and 1 after an error. The error is written to `errors/rank-N.json` in the folder.

    Args:
        configuration: class of the job's configuration, which is read from the folder's `config.json`.
        work: does the rank's work, given the configuration and the folder.
        user_errors: errors whose message is already one sentence for the user; other errors are shown with their type.
    """

    def main(path: str) -> int:
        die_with_parent()
        folder = RunFolder(Path(path))
        try:
            work(configuration.from_json(folder.config), folder)
        except Exception as error:  # noqa: BLE001 - the launcher reads the file and tells the user
            rank = own_rank()
            report = {
                "rank": rank,
                "time": time.time(),
                "message": str(error) if isinstance(error, user_errors) else f"{type(error).__name__}: {error}",
                "type": type(error).__name__,
                "lost_a_peer": isinstance(error, TransportError),
                "lost_rank": getattr(error, "lost_rank", None),
                "traceback": traceback.format_exc(),
            }
            with contextlib.suppress(OSError):  # a full disk must not hide the error, which is also logged
                write_json(folder.errors / f"rank-{rank}.json", report)
            traceback.print_exc()
            return 1
        return 0

    return main


def end_process(exit_code: int) -> NoReturn:
    """End this process without Python's own clean-up.

    Threads of the backend may still wait for ranks that no longer answer. When Python destroyed such threads in
    arbitrary order, ranks that had finished their work were aborted.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def set_up_device(name: str, threads: int) -> torch.device:
    """Set up this rank's device, with deterministic algorithms on CUDA, and return the device.

    Args:
        name: "cpu" or "cuda".
        threads: number of threads for tensor operations on the CPU.
    """
    torch.set_num_threads(threads)
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    # The same seed must give the same numbers.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False  # no TF32, because results are documented as fp32
    return device


def training_device(config: RanksConfig) -> torch.device:
    """Set up and return this rank's device for training; on a CPU, request scheduling for ranks that share cores."""
    if config.device == "cpu":
        use_batch_scheduling()
    return set_up_device(config.device, config.threads)


_SLICE_S = 0.02

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "armv7l": 380}  # number of the system call
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def use_batch_scheduling() -> None:
    """Request batch scheduling and long time slices for the calling thread and all threads that it starts later.

    Only the order of work changes, not its result. If the run was started with another policy (`chrt --idle`), that
    policy stays. If the kernel refuses or is not Linux, scheduling stays as it is, and a message is printed on stderr
    (the rank's log).
    """
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        print(
            "batch scheduling is not supported on this platform; ranks that share cores interrupt each other",
            file=sys.stderr,
        )
        return
    if os.sched_getscheduler(0) not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_BATCH, 0, nice, 0, round(_SLICE_S * 1e9), 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, ctypes.c_char_p(attributes), 0):
        reason = os.strerror(ctypes.get_errno())
        print(
            f"the kernel refused batch scheduling ({reason}); ranks that share cores interrupt each other",
            file=sys.stderr,
        )


def return_memory() -> None:
    """Return freed memory to the kernel; without glibc, do nothing, so the process keeps the memory."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def device_time(device: torch.device) -> float:
    """Wait until all work queued on the device has ended; return the time of `time.perf_counter`, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def rendezvous_store(timeout_s: float) -> Store:
    """Return a store that all ranks of the job share, including ranks that start again; every wait has a time limit."""
    method = os.environ.get(INIT_METHOD, "env://")
    if method.startswith("file://"):
        store: Store = FileStore(method.removeprefix("file://"))
    else:
        store, _, _ = next(rendezvous(method, own_rank(), int(os.environ["WORLD_SIZE"])))
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


@contextlib.contextmanager
def process_group(device: torch.device, timeout_s: float) -> Iterator[None]:
    """Create torch's default process group, run the block, and destroy the group; every rank must do this.

    If the block fails, the group is not destroyed, because the process is about to end.

    Args:
        device: the device of this rank.
        timeout_s: longest wait for another rank, in seconds.

    Raises:
        TransportError: a rank was lost while the ranks connected or inside the block.
    """
    # NCCL needs a GPU per rank; ranks that share a GPU use gloo.
    own_gpu = device.type == "cuda" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    try:
        dist.init_process_group(
            "nccl" if own_gpu else "gloo",
            init_method=os.environ.get(INIT_METHOD, "env://"),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if own_gpu else None,
        )
        failure_detector()  # its thread answers other ranks that ask which ranks are alive
    except RuntimeError as error:
        # True if another rank or the store is gone; False for a fault of this rank, such as a port in use.
        lost_store = isinstance(error, dist.DistNetworkError | dist.DistStoreError) and "EADDRINUSE" not in str(error)
        if not (lost_store or any(words in str(error) for words in _WORDS_OF_A_LOSS)):
            raise
        # Which rank was lost is unknown: the ranks have no connections to each other yet.
        raise TransportError(f"a rank was lost while ranks connected: {str(error).partition(chr(10))[0]}") from error
    with _in_group():
        yield


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Like `process_group`, but the group has only this rank, on a CPU, so that no other rank can break the group."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with _in_group():
        yield


@contextlib.contextmanager
def _in_group() -> Iterator[None]:
    postpone_compiler()
    try:
        yield
    except RuntimeError as error:
        lost = None if isinstance(error, TransportError) else backend_failure(error)
        if lost is None:
            raise
        raise lost from error
    dist.destroy_process_group()
