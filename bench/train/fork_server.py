"""The process that ranks are forked from: the launcher runs `python -m bench.train.fork_server MODULE CONNECTION`.

The process imports MODULE, which the ranks run, and then serves requests from the connection, whose file descriptor is
CONNECTION, one after the other: it calls a function and sends back the result or exception, or runs a job and sends
back the exit code. If MODULE has a function `prepare`, all ranks share the memory of what this function loads. Ranks
are started by torchrun's own functions, so their logs, the order in which they are stopped and the messages about
failures are those of torchrun.
"""

import contextlib
import gc
import importlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from bench.core import environment
from bench.core.processes import enter_namespaces
from bench.core.run_folder import RunFolder

try:
    import torch
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        PContext,
        SignalException,
        Std,
        start_processes,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from bench.train.rank import INIT_METHOD, end_process
except Exception as error:
    if (refusal := environment.failure_to_import_torch(error)) is None:
        raise
    with Connection(int(sys.argv[2])) as waiting:
        waiting.send(refusal)  # the answer to the first request
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
    try:
        if start_method == "fork":
            _prepare(module, folder)
        gc.freeze()  # the garbage collector does not touch, and so copy, memory that is shared with the ranks
        try:
            for index in range(len(hosts)):
                running[index * ranks_per_host] = _start(module, folder, hosts, index, ranks_per_host, start_method)
            return _wait(module, running, grace_s)
        finally:
            for ranks in running.values():
                ranks.close()  # stops the ranks that still run after the grace, or when the launcher stops the job
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


def _start(
    module: str,
    folder: RunFolder,
    hosts: Sequence[HostSettings],
    index: int,
    ranks_per_host: int,
    start_method: StartMethod,
) -> PContext:
    """Start the ranks of the host with this index; the other arguments are those of `run`."""
    namespaces, variables = hosts[index]
    of_host = {
        **variables,
        "WORLD_SIZE": str(len(hosts) * ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        INIT_METHOD: f"file://{folder.rendezvous / 'store'}",
        "TORCHELASTIC_RUN_ID": "none",  # torchrun's name for a job without a name; part of the logs' path
    }
    here = range(ranks_per_host)
    return start_processes(
        name=module,
        entrypoint=_rank,
        args=dict.fromkeys(here, (module, str(folder.path), namespaces)),
        envs={
            local: of_host | {"RANK": str(index * ranks_per_host + local), "LOCAL_RANK": str(local)} for local in here
        },
        logs_specs=DefaultLogsSpecs(
            str(folder.logs / f"host-{index}" if namespaces else folder.logs), redirects=Std.ALL
        ),
        start_method=start_method,
    )


def _wait(module: str, running: dict[int, PContext], grace_s: float) -> int:
    """Wait until all ranks have ended, or the grace after a failure is over; return the job's exit code, 0 or 1.

    Args:
        module: name of the module that every rank runs.
        running: the ranks of each host, by the host's first rank; hosts whose ranks have ended are removed.
        grace_s: as in `run`.
    """
    exit_code, ends_at = 0, math.inf
    while running and time.monotonic() < ends_at:
        for first, ranks in list(running.items()):
            if (result := ranks.wait(0)) is None:
                continue
            del running[first]
            if result.is_failed():
                failures = {first + local: failure for local, failure in result.failures.items()}
                print(ChildFailedError(module, failures), file=sys.stderr)
                exit_code, ends_at = 1, min(ends_at, time.monotonic() + grace_s)
        time.sleep(POLL_S)
    return exit_code


def _prepare(module: str, folder: RunFolder) -> None:
    prepare = getattr(importlib.import_module(module), "prepare", lambda _: None)
    try:
        prepare(str(folder.path))
    except SignalException:
        raise
    except Exception:  # noqa: BLE001 - every rank raises it again and reports it
        traceback.print_exc()


def _rank(module: str, folder: str, namespaces: Sequence[Path]) -> None:
    enter_namespaces(*namespaces)  # while this process has one thread
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # Python handlers would run only after a call into torch has returned
    if exit_code := importlib.import_module(module).main(folder):
        end_process(exit_code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
