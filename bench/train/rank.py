"""What every rank does around its work: device, process group, why it failed left behind, an end with its job."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from bench.core.config.configuration import Configuration
from bench.core.processes import die_with_parent
from bench.core.run_folder import RunFolder, write_json
from bench.train.compiler import postpone_compiler
from collectives.transport.base import TransportError
from collectives.transport.failure_detector import failure_detector
from collectives.transport.process_group import backend_failure

C = TypeVar("C", bound=Configuration)
INIT_METHOD = "BENCH_INIT_METHOD"
"""The variable that says how ranks meet; without it as torchrun has them meet."""
_WORDS_OF_A_LOSS = ("connectFullMesh", "Wait timeout")
"""in errors of no type of their own: of gloo, and of a store that is a file"""


def rank_main(
    configuration: type[C], work: Callable[[C, RunFolder], None], user_errors: tuple[type[Exception], ...]
) -> Callable[[str], int]:
    """Return a rank's main function: job folder -> exit code, 0, or 1 after an error that `errors/rank-N.json` tells.

    Args:
        configuration: of the job; stands in the folder's `config.json`.
        work: everything else.
        user_errors: errors whose message is already one sentence for the user; others are shown with their type.
    """

    def main(path: str) -> int:
        die_with_parent()
        folder = RunFolder(Path(path))
        try:
            work(configuration.from_json(folder.config), folder)
        except Exception as error:  # noqa: BLE001 - the launcher tells the user what the file says
            _leave_error(folder, error, is_sentence=isinstance(error, user_errors))
            traceback.print_exc()
            return 1
        return 0

    return main


def end_process(exit_code: int) -> NoReturn:
    """End this process without Python's own tidying up.

    Threads of the backend may wait for ranks that no longer answer, and tearing them down in no order has aborted
    ranks that had done all their work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def set_up_device(name: str, threads: int) -> torch.device:
    """This rank's device.

    Args:
        name: "cpu" or "cuda".
        threads: for tensor operations on the CPU.
    """
    torch.set_num_threads(threads)
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    # The same seed must give the same numbers.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False  # rows say fp32
    return device


@contextlib.contextmanager
def process_group(device: torch.device, timeout_s: float) -> Iterator[None]:
    """The job's process group; left standing after a failure, when the process is about to end anyway.

    Raises:
        TransportError: a rank was lost inside the block or while ranks met, also where only the backend noticed.
    """
    _meet(device, timeout_s)
    postpone_compiler()
    try:
        yield
    except TransportError:
        raise
    except RuntimeError as error:
        lost = backend_failure(error)
        if lost is None:
            raise
        raise lost from error
    dist.destroy_process_group()


def _meet(device: torch.device, timeout_s: float) -> None:
    # NCCL needs a GPU per rank; ranks that share one talk through gloo.
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
        failure_detector()  # from now on this rank answers when others ask who is still there
    except RuntimeError as error:
        if not _is_a_loss(error):
            raise
        # Which one cannot be found out: nobody has a way to the others yet.
        raise TransportError(f"a rank was lost while ranks met: {str(error).partition(chr(10))[0]}") from error


def _is_a_loss(error: RuntimeError) -> bool:
    """Whether another rank is gone, or its store, rather than this one's port taken or its network device unknown."""
    of_store = isinstance(error, dist.DistNetworkError | dist.DistStoreError) and "EADDRINUSE" not in str(error)
    return of_store or any(words in str(error) for words in _WORDS_OF_A_LOSS)


def _leave_error(folder: RunFolder, error: Exception, *, is_sentence: bool) -> None:
    rank = int(os.environ.get("RANK", "0"))
    with contextlib.suppress(OSError):  # a full disk must not hide the error that the log also holds
        write_json(
            folder.error_of(rank),
            {
                "rank": rank,
                "time": time.time(),
                "message": str(error) if is_sentence else f"{type(error).__name__}: {error}",
                "type": type(error).__name__,
                "lost_a_peer": isinstance(error, TransportError),
                "lost_rank": getattr(error, "lost_rank", None),
                "traceback": traceback.format_exc(),
            },
        )
