"""Communication thread: works on buckets in the order in which DDP hands them over, while backward goes on.

A failure in the thread is kept, and every open Future is completed with its own buffer: an exception in a Future
surfaces garbled, an unset one hangs.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch

from collectives.transport.base import Transport
from compressors.ddp.bucket import Bucket

Trigger = Literal["async", "sync"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One bucket on its way through the thread.

    Attributes:
        future: completed with `buffer` once that holds the updates.
        buffer: all gradients of the bucket, 1-D.
        bucket: views of the buffer, by layer.
        is_last: of this step.
        arrived: when DDP handed it over, in seconds of `time.perf_counter`.
        ready: on a GPU, when the gradients will be there.
    """

    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    bucket: Bucket
    is_last: bool
    arrived: float
    ready: torch.cuda.Event | None


class CommunicationThread:
    """One thread per rank.

    Args:
        work: what to do with a bucket.
        transport: for the sync trigger's command; used by nothing but this thread and `work`.
        trigger: "async" starts a bucket when it is ready, "sync" when rank 0 saw all ranks finish backward.

    Attributes:
        put: hands a job over.
        failure: the first exception in the thread, to be raised by whoever waits for the step.
    """

    def __init__(self, work: Callable[[Job], None], transport: Transport, trigger: Trigger) -> None:
        self.failure: Exception | None = None
        self._work = work
        self._transport = transport
        self._trigger = trigger
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.put = self._jobs.put
        self._thread = threading.Thread(target=self._serve, name="exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        stream: Any = None
        waiting: list[Job] = []
        while (job := self._jobs.get()) is not None:
            if job.ready is not None:
                stream = stream or torch.cuda.Stream(job.buffer.device)
                torch.cuda.set_stream(stream)
                stream.wait_event(job.ready)
            waiting.append(job)
            if self.failure is None and self._trigger == "sync" and not job.is_last:
                continue
            try:
                if self.failure is None and self._trigger == "sync":
                    self._await_command()
                for each in waiting:
                    if self.failure is None:
                        self._work(each)
                    each.future.set_result(each.buffer)
            except Exception as error:  # noqa: BLE001 - kept for whoever waits for the step
                self.failure = error
                for each in waiting:
                    if not each.future.done():
                        each.future.set_result(each.buffer)
            waiting = []

    def _await_command(self) -> None:
        """Every rank tells rank 0 that its backward ended; rank 0 then commands all to start."""
        transport = self._transport
        word = torch.zeros(1, dtype=torch.uint8, device=transport.device)
        with transport.counted_as("control"):
            if transport.rank == 0:
                others = range(1, transport.world_size)
                for source in others:
                    transport.receive_into(word, source).wait()
                for pending in [transport.send(word, to) for to in others]:
                    pending.wait()
            else:
                transport.send(word, 0).wait()
                transport.receive_into(word, 0).wait()
