"""The exchange: compressor x collective as DDP's communication hook.

One communication thread per rank, with a process group of its own, takes buckets in the order in which DDP hands them
over, so encoding and sending overlap with the rest of backward. The hook returns a Future per bucket. A failure in
the thread is kept, every open Future is completed with its own buffer (an exception in a Future surfaces garbled, an
unset one hangs), and `finish_step` re-raises it.

Compressors propose new state while they encode; after the last bucket the ranks agree whether all gradients were
finite, and the state is committed or dropped on all of them alike; a collective's own state with it.
"""

from __future__ import annotations

import copy
import dataclasses
import queue
import threading
import time
from typing import Any, Literal

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from collectives.base import Collective, Key
from collectives.payloads.base import Payload
from collectives.server import Server
from collectives.transport.base import Transport
from compressors.base import Compressor
from compressors.layer import Bucket, Layer, Sent, Step
from compressors.unit import stand_in

Trigger = Literal["async", "sync"]
Nonfinite = Literal["skip", "raise", "zero"]


class NonFiniteGradient(RuntimeError):
    """A gradient held NaN or infinity and the run asked to stop at that."""


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What one step's exchange did on this rank.

    Attributes:
        skipped: a rank saw a non-finite gradient; the optimizer step must be left out.
        encode_s, exchange_s: busy seconds of the communication thread; encoding is part of both.
        exposed_s: seconds between the last bucket's arrival and the last result. None: the engine hides it.
        sent: what was encoded, per layer.
        staleness: versions of the parameters that the gradient was behind when it was applied. None: nothing is stale.
    """

    skipped: bool = False
    encode_s: float | None = None
    exchange_s: float | None = None
    exposed_s: float | None = None
    sent: list[Sent] = dataclasses.field(default_factory=list)
    staleness: int | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class _Job:
    """One bucket on its way through the thread."""

    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    bucket: Bucket
    is_last: bool
    arrived: float
    ready: torch.cuda.Event | None


class Exchange:
    """Joins a compressor and a collective to DDP.

    Args:
        compressor, collective: the pair; the collective is bound to `transport`.
        transport: wires of the communication thread, used by nothing else.
        layers: every trainable parameter, as `layers_of(model)` gives them.
        trigger: "async" starts a bucket when it is ready, "sync" when rank 0 saw all ranks finish backward.
        nonfinite: what to do about a non-finite gradient.
    """

    def __init__(
        self,
        compressor: Compressor,
        collective: Collective,
        transport: Transport,
        layers: list[Layer],
        *,
        trigger: Trigger,
        nonfinite: Nonfinite,
    ) -> None:
        self.compressor = compressor
        self.collective = collective
        self.transport = transport
        self.trigger = trigger
        self.nonfinite = nonfinite
        self._layer_of = {id(layer.weight): layer for layer in layers}
        self._layer_by_id = {layer.id: layer for layer in layers}
        if isinstance(collective, Server):
            # The server encodes sums, the workers gradients: thresholds and densities of the two must not mix.
            self._downlink = copy.deepcopy(compressor)
            collective.recode = self._recode
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._held: list[_Job] = []  # sync trigger: buckets that wait for the command
        self._failure: BaseException | None = None
        self._saw_nonfinite = False
        self._outcome = Outcome()
        self._encode_s = self._exchange_s = 0.0
        self._step: Step | None = None
        self._thread = threading.Thread(target=self._serve, name="exchange", daemon=True)
        self._thread.start()

    def start_step(self, step: Step) -> None:
        """Tell the exchange where training is; call before `backward`."""
        self._step = step
        self._outcome = Outcome()
        self._encode_s = self._exchange_s = 0.0
        self._saw_nonfinite = False

    def hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook; runs in autograd's thread and only enqueues."""
        assert self._step is not None
        buffer = bucket.buffer()
        on_cuda = buffer.device.type == "cuda"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] if on_cuda else None)
        ready = None
        if on_cuda:
            ready = torch.cuda.Event()
            ready.record()
        layers = [self._layer_of[id(parameter)] for parameter in bucket.parameters()]
        gradients = [gradient.flatten() for gradient in bucket.gradients()]
        self._jobs.put(
            _Job(
                future=future,
                buffer=buffer,
                bucket=Bucket(layers=layers, gradients=gradients, step=self._step),
                is_last=bucket.is_last(),
                arrived=time.perf_counter(),
                ready=ready,
            )
        )
        return future

    def finish_step(self) -> Outcome:
        """What the exchange of this step did; call right after `backward`.

        Raises:
            TransportError: a rank was lost or did not answer in time.
            NonFiniteGradient: as `nonfinite="raise"` asks for.
        """
        if self._failure is not None:
            raise self._failure
        return self._outcome

    def close(self) -> None:
        """Stop the thread."""
        self._jobs.put(None)
        self._thread.join()

    def state_dict(self) -> dict[str, Any]:
        """This rank's compressor state."""
        return self.compressor.state_dict()

    def _serve(self) -> None:
        stream: Any = None
        while (job := self._jobs.get()) is not None:
            if job.ready is not None:
                stream = stream or torch.cuda.Stream(job.buffer.device)
                torch.cuda.set_stream(stream)
                stream.wait_event(job.ready)
            try:
                self._accept(job)
            except Exception as error:  # noqa: BLE001 - kept, and re-raised in the training thread by finish_step
                self._failure = self._failure or error
            if self._failure is not None:
                self._release(job)

    def _accept(self, job: _Job) -> None:
        self._held.append(job)
        if self.trigger == "sync":
            if not job.is_last:
                return
            self._await_command()
        for held in self._held:
            self._exchange(held)
            if not held.is_last:  # the last result is handed over only once the ranks agreed on the step
                held.future.set_result(held.buffer)
        self._held = []
        if job.is_last:
            self._conclude(job)

    def _exchange(self, job: _Job) -> None:
        started = time.perf_counter()
        self._screen(job)
        self.compressor.reduce(job.bucket, self.collective)
        self._encode_s += job.bucket.encode_s
        self._exchange_s += time.perf_counter() - started
        self._outcome.sent += job.bucket.sent

    def _screen(self, job: _Job) -> None:
        """Keep NaN and infinity away from the compressor: residuals would never recover."""
        if bool(torch.isfinite(job.buffer.sum())) or bool(torch.isfinite(job.buffer).all()):
            return
        if self.nonfinite == "zero":
            torch.nan_to_num_(job.buffer, nan=0.0, posinf=0.0, neginf=0.0)
        else:
            self._saw_nonfinite = True
            job.buffer.zero_()

    def _conclude(self, job: _Job) -> None:
        started = time.perf_counter()
        (dropped,) = (
            self.transport.all_reduce_scalars([float(self._saw_nonfinite)], "max")
            if self.nonfinite != "zero"
            else (0.0,)
        )
        if dropped:
            self.compressor.drop()
            self.collective.drop()
            self._outcome.skipped = True
            if self.nonfinite == "raise":
                assert self._step is not None
                raise NonFiniteGradient(f"a gradient was not finite at step {self._step.index}")
        else:
            self.compressor.commit()
            self.collective.commit()
        ended = time.perf_counter()
        self._outcome.encode_s = self._encode_s
        self._outcome.exchange_s = self._exchange_s + ended - started
        self._outcome.exposed_s = ended - job.arrived
        job.future.set_result(job.buffer)

    def _recode(self, total: torch.Tensor, key: Key) -> Payload:
        """What the server answers with where its downlink is encoded again."""
        assert self._step is not None
        payload = self._downlink.encode(total, stand_in([self._layer_by_id[i] for i in key]), self._step)
        self._downlink.commit()
        return payload

    def _await_command(self) -> None:
        """Every rank tells rank 0 that its backward ended; rank 0 then commands all to start."""
        word = torch.zeros(1, dtype=torch.uint8, device=self.transport.device)
        with self.transport.counted_as("control"):
            if self.transport.rank == 0:
                others = range(1, self.transport.world_size)
                for source in others:
                    self.transport.receive_into(word, source).wait()
                for pending in [self.transport.send(word, to) for to in others]:
                    pending.wait()
            else:
                self.transport.send(word, 0).wait()
                self.transport.receive_into(word, 0).wait()

    def _release(self, job: _Job) -> None:
        """After a failure: let backward end, with each bucket's own gradient as its result."""
        for held in {id(j): j for j in [*self._held, job]}.values():
            if not held.future.done():
                held.future.set_result(held.buffer)
        self._held = []
