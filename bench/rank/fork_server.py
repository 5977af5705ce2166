"""The process that ranks are forked from: the launcher runs `python -m bench.rank.fork_server MODULE CONNECTION`.

The process imports MODULE, which the ranks run. Then it serves requests from the connection, whose file descriptor is
CONNECTION, one after the other. If a request is a function, the process calls it and sends back the result or the
exception. If a request is a job, the process runs it and sends back the exit code. If MODULE has a function `prepare`,
all ranks share the data that this function loads into memory. Torchrun's own functions start the ranks, so their logs,
the order in which they are stopped and the messages about failures are as with torchrun.
"""

import collections
import contextlib
import functools
import gc
import importlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from bench.core import environment
from bench.core.processes import enter_namespaces
from bench.core.run_folder import RunFolder, read_json

try:
    import torch
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        PContext,
        RunProcsResult,
        SignalException,
        Std,
        start_processes,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from bench.rank.process import INIT_METHOD, end_process
    from collectives.transport.base import MembershipError, TransportError
except Exception as error:
    if (refusal := environment.failure_to_import_torch(error)) is None:
        raise
    with Connection(int(sys.argv[2])) as waiting:
        waiting.send(refusal)  # the launcher reads it as the answer to its first request
    sys.exit(1)

POLL_S = 0.02

StartMethod = Literal["fork", "spawn"]
# Files of the namespaces that a host's ranks enter, and environment variables for the ranks.
HostSettings = tuple[Sequence[Path], Mapping[str, str]]


def main(module: str, connection: int) -> None:
    """Import the ranks' module, then serve requests until the launcher closes its end of the connection.

    Args:
        module: name of the module that every rank runs.
        connection: file descriptor of this process's end of the connection.
    """
    gc.disable()  # importing modules creates no garbage
    importlib.import_module(module)
    torch.set_num_threads(1)  # a fork copies only the calling thread
    environment.origin_columns()  # fills a cache that all ranks share
    launcher: Connection[Any, Any] = Connection(connection)
    with contextlib.suppress(EOFError):
        while True:
            match launcher.recv():
                case dict() as job:
                    launcher.send(run(**job))
                case function, args, kwargs:
                    try:
                        launcher.send(function(*args, **kwargs))
                    except Exception as error:  # noqa: BLE001 - raised again by the launcher
                        error.add_note(traceback.format_exc())
                        launcher.send(error)


def run(
    module: str,
    folder: RunFolder,
    hosts: Sequence[HostSettings],
    ranks_per_host: int,
    start_method: StartMethod,
    grace_s: float,
) -> int:
    """Run one job to its end and return the job's exit code, 0 or 1.

    Args:
        module: the module that every rank runs.
        folder: the job's folder.
        hosts: the virtual hosts; a single host without namespaces is this machine.
        ranks_per_host: number of ranks on each host.
        start_method: "fork", or "spawn" for a device that cannot be used after a fork.
        grace_s: number of seconds for which other hosts may continue after a rank of one host failed, so that they can
            report which rank they lost.
    """
    with folder.log.open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    running: dict[int, PContext] = {}
    start = functools.partial(_start, module, folder, hosts, ranks_per_host, start_method)
    try:
        if start_method == "fork":
            _call(module, "prepare", folder)
        restarts = Restarts(start, folder) if _call(module, "ranks_may_leave", folder) else None
        count = ranks_per_host if restarts is None else 1  # ranks that end together if one of them fails
        gc.freeze()  # otherwise, garbage collection in the ranks would copy the memory that they share
        try:
            for first in range(0, len(hosts) * ranks_per_host, count):
                running[first] = start(range(first, first + count))
            return _wait(module, running, grace_s, restarts)
        finally:
            for ranks in running.values():
                ranks.close()  # stops ranks that still run after the grace period, or when the launcher stops the job
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


def _start(
    module: str,
    folder: RunFolder,
    hosts: Sequence[HostSettings],
    ranks_per_host: int,
    start_method: StartMethod,
    ranks: range,
) -> PContext:
    """Start these ranks, which are on one host; the other arguments are those of `run`."""
    index = ranks.start // ranks_per_host
    namespaces, variables = hosts[index]
    of_host = {
        **variables,
        "WORLD_SIZE": str(len(hosts) * ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        INIT_METHOD: f"file://{folder.rendezvous / 'store'}",
        # part of the logs' path; "none" is torchrun's name for a job without a name
        "TORCHELASTIC_RUN_ID": f"rank-{ranks.start}" if len(ranks) == 1 else "none",
    }
    return start_processes(
        name=module,
        entrypoint=_rank,
        args=dict.fromkeys(range(len(ranks)), (module, str(folder.path), namespaces)),
        envs={
            place: of_host | {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks_per_host)}
            for place, rank in enumerate(ranks)
        },
        logs_specs=DefaultLogsSpecs(
            str(folder.logs / f"host-{index}" if namespaces else folder.logs), redirects=Std.ALL
        ),
        start_method=start_method,
    )


# A rank is not started again once it has ended this many times in a row before its first exchange.
MOST_FAILED_STARTS = 5
# Reported errors that mean that a rank was lost. Any other error, such as a training loss of NaN, would occur again.
_LOSSES = (MembershipError.__name__, TransportError.__name__)
PAUSE_S = 1.0


class Restarts:
    """Starts lost ranks again while the other ranks continue; rank 0 must not be lost.

    Args:
        start: starts a range of ranks.
        folder: the job's folder.
    """

    def __init__(self, start: Callable[[range], PContext], folder: RunFolder) -> None:
        self._start = start
        self._folder = folder
        self._failed_starts: collections.Counter[int] = collections.Counter()
        self._due: dict[int, float] = {}

    def schedule(self, rank: int, result: RunProcsResult) -> bool:
        """Schedule a lost rank to start again after a pause; return True if the rank will start again.

        The result is False if the rank failed by its own error, or if its start has failed too often. The error report
        of a rank that will start again is removed, because the job goes on.
        """
        joined = self._folder.joined(rank)
        self._failed_starts[rank] = 0 if joined.exists() else self._failed_starts[rank] + 1
        joined.unlink(missing_ok=True)
        path = self._folder.errors / f"rank-{rank}.json"
        report = read_json(path)
        ((_, failure),) = result.failures.items()
        was_lost = report["type"] in _LOSSES if report else failure.exitcode < 0  # by a signal
        if not was_lost or self._failed_starts[rank] >= MOST_FAILED_STARTS:
            return False
        self._due[rank] = time.monotonic() + PAUSE_S
        why = report["message"] if report else f"it ended with exit code {failure.exitcode}"
        path.unlink(missing_ok=True)
        print(f"rank {rank} starts again in {PAUSE_S:g} s: {why}", file=sys.stderr, flush=True)
        return True

    def start_due(self) -> dict[int, PContext]:
        """Start the ranks whose pause is over, and return their processes by rank."""
        now = time.monotonic()
        due = [rank for rank, at in self._due.items() if at <= now]
        for rank in due:
            del self._due[rank]
        return {rank: self._start(range(rank, rank + 1)) for rank in due}


def _wait(module: str, running: dict[int, PContext], grace_s: float, restarts: Restarts | None = None) -> int:
    """Wait until all ranks have ended, or until `grace_s` after a failure; return the job's exit code, 0 or 1.

    Args:
        module: name of the module that every rank runs.
        running: groups of ranks that were started together, by first rank; groups that have ended are removed.
        grace_s: as in `run`.
        restarts: starts lost ranks again until rank 0 has ended; None if every failure ends the job.
    """
    exit_code, ends_at = 0, math.inf
    while running and time.monotonic() < ends_at:
        for first, ranks in list(running.items()):
            if (result := ranks.wait(0)) is None:
                continue
            del running[first]
            if restarts is not None and 0 not in running:  # rank 0 has ended, so the others are about to end
                ends_at = min(ends_at, time.monotonic() + grace_s)
                if first != 0:
                    continue
            if not result.is_failed():
                continue
            if restarts is not None and first != 0 and restarts.schedule(first, result):
                ranks.close()
                continue
            failures = {first + place: failure for place, failure in result.failures.items()}
            print(ChildFailedError(module, failures), file=sys.stderr)
            exit_code, ends_at = 1, min(ends_at, time.monotonic() + grace_s)
        if restarts is not None and 0 in running:
            running |= restarts.start_due()
        time.sleep(POLL_S)
    return exit_code


def _call(module: str, name: str, folder: RunFolder) -> Any:
    """Return the result of calling a module's function with a folder; None if there is no function, or it fails."""
    function = getattr(importlib.import_module(module), name, lambda _: None)
    try:
        return function(str(folder.path))
    except SignalException:
        raise
    except Exception:  # noqa: BLE001 - every rank raises it again and reports it
        traceback.print_exc()
        return None


def _rank(module: str, folder: str, namespaces: Sequence[Path]) -> None:
    enter_namespaces(*namespaces)  # while this process has one thread
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # Python handlers would run only after a call into torch has returned
    if exit_code := importlib.import_module(module).main(folder):
        end_process(exit_code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
