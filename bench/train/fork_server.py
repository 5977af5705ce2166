"""The process that ranks are forked from: `python -m bench.train.fork_server MODULE CONNECTION`, by the launcher.

It imports MODULE, which its ranks run, and then does what it is asked through the connection, one thing after the
other: a function is called and its result or exception sent back, a job is run and its exit code sent back. What
MODULE's `prepare` loads, where it has one, all ranks share. Ranks are torchrun's own process contexts: their logs, the
order in which they are stopped and what is said of a failed one are as torchrun has them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from bench.core import environment
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
        waiting.send(refusal)  # the answer to the first request, whatever that is
    sys.exit(1)

POLL_S = 0.02

StartMethod = Literal["fork", "spawn"]


def main(module: str, connection: int) -> None:
    """Serve until the launcher closes its end of the connection."""
    gc.disable()  # while modules come in, nothing is garbage
    importlib.import_module(module)
    torch.set_num_threads(1)  # a fork leaves all other threads behind
    environment.origin_columns()  # kept for all ranks
    launcher: Connection[Any, Any] = Connection(connection)
    with contextlib.suppress(EOFError):
        while True:
            match launcher.recv():
                case dict() as job:
                    launcher.send(run(module, **job))
                case function, args, kwargs:
                    launcher.send(call(function, args, kwargs))


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the function returns or raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - raised again by the launcher
        error.add_note(traceback.format_exc())
        return error


def run(module: str, folder: RunFolder, num_ranks: int, start_method: StartMethod) -> int:
    """Run one job to its end; the exit code is 0 or 1.

    Args:
        module: what every rank runs.
        folder: the job's.
        num_ranks: all of them are on this machine.
        start_method: fork, or spawn where the device does not survive a fork.
    """
    with folder.log.open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    try:
        if start_method == "fork":
            _prepare(module, folder)
        gc.freeze()  # what is shared with the ranks stays shared
        ranks = _start(module, folder, num_ranks, start_method)
        try:
            result = ranks.wait(period=POLL_S)
        finally:
            ranks.close()  # those that are left when the launcher stops the job
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    if result is not None and result.is_failed():
        print(ChildFailedError(module, result.failures), file=sys.stderr)
        return 1
    return 0


def _prepare(module: str, folder: RunFolder) -> None:
    prepare = getattr(importlib.import_module(module), "prepare", lambda _: None)
    try:
        prepare(str(folder.path))
    except SignalException:
        raise
    except Exception:  # noqa: BLE001 - every rank meets it again, and says so as a rank does
        traceback.print_exc()


def _start(module: str, folder: RunFolder, num_ranks: int, start_method: StartMethod) -> PContext:
    store = folder.rendezvous / "store"
    return start_processes(
        name=module,
        entrypoint=_rank,
        args=dict.fromkeys(range(num_ranks), (module, str(folder.path))),
        envs={rank: _rank_variables(rank, num_ranks, store) for rank in range(num_ranks)},
        logs_specs=DefaultLogsSpecs(str(folder.logs), redirects=Std.ALL),
        start_method=start_method,
    )


def _rank(module: str, folder: str) -> None:
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the server's own handlers would wait for a call into torch to return
    if exit_code := importlib.import_module(module).main(folder):
        end_process(exit_code)


def _rank_variables(rank: int, world_size: int, store: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        INIT_METHOD: f"file://{store}",
        "TORCHELASTIC_RUN_ID": "none",  # as torchrun names a job that has no name: part of its logs' folder
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
