"""Run a function in several real processes, one gloo rank each, and show the failing rank's traceback in pytest.

Processes are forked from a new process that has imported modules and done nothing else: a process in which torch has
started threads must not be forked, and imports would take seconds in each rank. They meet through a file store, so
that no port can collide. When the first rank fails or the time is up, the others are killed, because SIGTERM does not
end a rank that hangs in a collective.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.testing.limits import LIMIT_S

# What most ranks import: once instead of in every rank. A step of torch's optimizers imports its compiler.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "numpy", "gradwire.ddp.attach", "bench.strategies.ddp"]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    tmp_path: Path,
    args: Sequence[Any] = (),
    *,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Return the results of `fn(rank, *args)`, in rank order.

    Args:
        fn: a function at the top level of a module; torch.distributed is initialised with gloo when it starts.
        world_size: number of processes.
        tmp_path: an empty folder; holds the rendezvous file.
        args: further arguments of `fn`, which must be picklable, as must its result.
        may_die: ranks that may end or stop without an answer; their result is None.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = str(tmp_path / f"rendezvous-{time.monotonic_ns()}")
    inboxes, processes = [], []
    for rank in range(world_size):
        inbox, outbox = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(fn, rank, world_size, store, outbox, args))
        process.start()
        outbox.close()  # the end of the process must be the end of the pipe
        inboxes.append(inbox)
        processes.append(process)
    try:
        return _collect(inboxes, processes, time.monotonic() + LIMIT_S, may_die)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for inbox in inboxes:
            inbox.close()


def _collect(inboxes: list[Connection], processes: list[Any], deadline: float, may_die: Collection[int]) -> list[Any]:
    results: list[Any] = [None] * len(inboxes)
    waiting: dict[Any, int] = dict(zip(inboxes, range(len(inboxes)), strict=True))
    while set(waiting.values()) - set(may_die):
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            pytest.fail(f"no answer from rank {', '.join(map(str, sorted(waiting.values())))} in time", pytrace=False)
        for inbox in ready:
            rank = waiting.pop(inbox)
            try:
                ok, value = pickle.loads(inboxes[rank].recv_bytes())
            except EOFError:
                processes[rank].join()
                if rank not in may_die:
                    pytest.fail(f"rank {rank} ended with exit code {processes[rank].exitcode}", pytrace=False)
                continue
            if not ok:
                pytest.fail(f"rank {rank}:\n{value}", pytrace=False)
            results[rank] = value
    return results


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    outbox: Connection,
    args: Sequence[Any],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=LIMIT_S),
        )
        dist.barrier()  # a rank that ends at once would break the set-up of a slower one
        answer = (True, fn(rank, *args))
    except BaseException:  # noqa: BLE001 - whatever it was, pytest shall show it
        answer = (False, traceback.format_exc())
    outbox.send_bytes(pickle.dumps(answer))  # by value: tensors sent directly would need this process to stay alive
    outbox.close()
    os._exit(0)  # the store and the wires may be broken on purpose: no orderly shutdown
