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
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
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
        waiting.send(refusal)  # the answer to the first request
    sys.exit(1)

POLL_S = 0.02

StartMethod = Literal["fork", "spawn"]


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
                    launcher.send(run(module, **job))
                case function, args, kwargs:
                    try:
                        launcher.send(function(*args, **kwargs))
                    except Exception as error:  # noqa: BLE001 - raised again by the launcher
                        error.add_note(traceback.format_exc())
                        launcher.send(error)


def run(module: str, folder: RunFolder, num_ranks: int, start_method: StartMethod) -> int:
    """Run one job to its end and return the job's exit code, 0 or 1.

    Args:
        module: the module that every rank runs.
        folder: the job's folder.
        num_ranks: number of ranks, all on this machine.
        start_method: "fork", or "spawn" for a device that cannot be used after a fork.
    """
    with folder.log.open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    variables = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        INIT_METHOD: f"file://{folder.rendezvous / 'store'}",
        "TORCHELASTIC_RUN_ID": "none",  # torchrun's name for a job without a name; part of the logs' path
    }
    try:
        if start_method == "fork":
            _prepare(module, folder)
        gc.freeze()  # the garbage collector does not touch, and so copy, memory that is shared with the ranks
        ranks: PContext = start_processes(
            name=module,
            entrypoint=_rank,
            args=dict.fromkeys(range(num_ranks), (module, str(folder.path))),
            envs={rank: variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)},
            logs_specs=DefaultLogsSpecs(str(folder.logs), redirects=Std.ALL),
            start_method=start_method,
        )
        try:
            result = ranks.wait(period=POLL_S)
        finally:
            ranks.close()  # stops the ranks that still run when the launcher stops the job
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
    except Exception:  # noqa: BLE001 - every rank raises it again and reports it
        traceback.print_exc()


def _rank(module: str, folder: str) -> None:
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # Python handlers would run only after a call into torch has returned
    if exit_code := importlib.import_module(module).main(folder):
        end_process(exit_code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
