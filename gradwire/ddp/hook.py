"""`CompressionHook`: a DDP communication hook that exchanges buckets of gradients in a separate thread.

DDP hands buckets over during backward, and the thread exchanges them in that order. If the thread fails, `finish_step`
raises the thread's exception. Every pending Future is then completed with its bucket's buffer, because DDP garbles the
text of an exception in a Future, and hangs if a Future is never completed.
"""

import abc
import collections
import dataclasses
import functools
import math
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from typing_extensions import override

from collectives.base import Collective
from collectives.transport.base import WakeupEvent
from compressors.base import DdpHook
from compressors.layer import Layer, Step
from compressors.parts.buckets import clip_factor
from gradwire.ddp.gradients import (
    ZeroCopyGradients,
    change_since_wrapping,
    reduced_kinds,
    reduced_layers,
    why_missing,
)
from gradwire.exchange.communicator import (
    CompressedCommunicator,
    HookSettings,
    await_command,
    own_transport,
)
from gradwire.exchange.marks import mark
from gradwire.exchange.reducer import DONE, PendingReduction, Reducer
from gradwire.exchange.report import Bucket, StepReport
from gradwire.step_guard import after_closure, checked_optimizers, parameters_of, unknown_parameter

_CLOSED = "the communication hook of this model is closed; wrap the model in DDP again"


@dataclasses.dataclass(kw_only=True, eq=False)
class _Job(Bucket):
    """One bucket on its way through the communication thread.

    Attributes:
        buffer: DDP's 1-D buffer with all gradients of the bucket, except those that `ZeroCopyGradients` took; the
            updates are written to this buffer.
        future: completed with `buffer` once `buffer` holds the updates.
        is_last: True for the last bucket of a step.
        arrived: `time.perf_counter()` when DDP handed the bucket over.
        ready: on a GPU, the event after which the gradients are valid.
        pending: the bucket's exchange, once it has been started.
    """

    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]
    is_last: bool
    arrived: float
    ready: torch.cuda.Event | None
    pending: PendingReduction = DONE


class CompressionHook(CompressedCommunicator):
    """DDP communication hook that exchanges compressed gradients; `attach` creates it.

    After the last bucket the ranks agree whether all gradients were finite. If so, all ranks keep the new state of the
    reducer and the collective, such as residuals; otherwise all ranks discard it and keep the old state.

    Attributes:
        layers: every parameter that DDP reduces.
        reducer: the compressor with this rank's state. During a step only the communication thread uses `reducer`,
            `collective` and `transport`.
        collective: sums the payloads.
        transport: connects the ranks.
    """

    def __init__(
        self, ddp: DistributedDataParallel, reducer: Reducer, collective: Collective, settings: HookSettings
    ) -> None:
        transport = own_transport(next(ddp.parameters()).device, settings.timeout_s, ddp.process_group)
        super().__init__(reduced_layers(ddp), reducer, collective, transport, settings.nonfinite)
        self._ddp = ddp
        self._settings = settings
        self._held: list[_Job] = []  # buckets that wait, with trigger "sync" until backward ends
        self._jobs: queue.SimpleQueue[list[_Job]] = queue.SimpleQueue()
        self._bell = WakeupEvent()  # rung after each job is queued
        self._failure: Exception | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._serve, name="exchange", daemon=True)
        self._thread.start()
        # Python must not end while the thread is inside torch, which would end the process with an error.
        self._at_exit = weakref.finalize(self, _end_thread, self._thread, self._jobs, self._bell)
        # DDP inspects annotations of the hook and cannot read postponed ones; a lambda has none.
        ddp.register_comm_hook(None, lambda _, bucket: self._take(bucket))
        # Gradients that are scaled or clipped must lie in DDP's buffers, where they can be changed.
        changes = settings.scaler is not None or settings.clip_norm is not None
        self._taken = ZeroCopyGradients(ddp, enabled=not changes)
        self._attached = self.guard.attach(ddp.module, self._why_not_exchanged, reducer.compressor, transport.rank)
        self._kinds = reduced_kinds(ddp)
        self._known: set[int] = set()  # ids of the optimizers' parameters at the time of `watch`
        self._updated: set[int] = set()  # ids of the optimizers that have used the last exchanged gradients
        self._layer_of = {id(layer.weight): layer for layer in self.layers}
        self._announced: Step | None = None
        self._unfinished = self._is_whole = False  # since `finish_step`: has any bucket come? has the last?
        self._overflowed = False
        self._scale: torch.Tensor | None = None  # a tensor, because reading it from a GPU would wait for the GPU
        self._num_backwards = 0
        self._checks_weights = False
        self._difference = ""  # a warning about weights that differ between ranks
        self._any_nonfinite: Callable[[], bool] = lambda: False

    def watch(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make `step` of these optimizers do nothing in a skipped step, so that the loop need not call `step_ok`.

        Raises:
            ValueError: an optimizer does not call the hooks of its `step`.
        """
        self._attached.watch(checked_optimizers(optimizers), after_closure(self._drop_if_skipped))
        self._known |= {id(parameter) for each in optimizers for parameter in parameters_of(each)}

    def start_step(self, step: Step) -> None:
        """Set the `Step` of the next `backward`; without this call the hook counts the steps itself."""
        self._announced = step
        self.guard.set_epoch(None)

    def end_pause(self) -> None:
        """Exclude the time since the last step, such as the time of an evaluation, from the next step's time."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients: `backward` inside this context adds to the gradients and sends nothing.

        Run forward inside this context, too. The first `backward` outside compresses and exchanges the sum; only that
        `backward` changes residuals. Call `step_ok` after that `backward`, not inside this context.
        """
        return cast("AbstractContextManager[None]", self._ddp.no_sync())

    def step_ok(self) -> bool:
        """Return True if the caller must call `optimizer.step()`; False if a rank's gradient was not finite.

        Call this method once per step, unless `attach` was given the optimizer. With `scaler` the result is always
        True, because the scaler skips the step.

        Raises:
            TransportError: a rank was lost or did not answer in time.
            NonFiniteGradient: a gradient was not finite, and `nonfinite` is "raise".
            RuntimeError: DDP has not handed over all gradients since the last call, so the ranks' models would diverge.
        """
        return not self.finish_step().skipped

    def finish_step(self) -> StepReport:
        """Return the report of the exchange in the last `backward`; raises the same errors as `step_ok`."""
        has_begun, is_whole = self._unfinished, self._is_whole
        self._unfinished = self._is_whole = False
        if self._failure is not None:
            raise self._failure
        if not is_whole:
            raise RuntimeError(_CLOSED if self.guard.closed else self._why_missing(has_begun=has_begun))
        self.guard.check()
        if self._difference and self.transport.rank == 0:
            warnings.warn(self._difference, stacklevel=3)
        self._difference = ""
        return self._report

    def close(self) -> None:
        """Stop the thread, and release the process group and the collective; every rank must call this method.

        Afterwards `backward` through this DDP model raises an error; wrap the model in DDP again to continue training.
        Later calls do nothing.
        """
        if self.guard.closed:
            return
        self._at_exit.detach()
        self._hand_over([])
        self._thread.join()
        self._bell.close()
        self._taken.close()
        self._attached.close()
        # Otherwise this DDP's buckets would also collect the gradients of a new DDP around the same model.
        self._ddp._remove_autograd_hooks()
        self._ddp.register_forward_hook(_refuse_backward)
        super().close()
        # DDP's C++ reducer references the hook, which Python's garbage collector cannot see: break the cycle here.
        del self._taken, self._ddp, self._attached

    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Queue a bucket for the communication thread; return the Future that DDP waits for.

        DDP calls this method in autograd's thread.
        """
        if bucket.index() == 0:
            self._begin()
        buffer = bucket.buffer()
        gradients, updates = self._taken.of(bucket)
        self._is_whole = bucket.is_last()
        job = _Job(
            layers=[self._layer_of[id(parameter)] for parameter in bucket.parameters()],
            gradients=gradients,
            updates=updates,
            step=self._step,
            screen_=self.guard.screen_,
            buffer=buffer,
            future=torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None),
            is_last=self._is_whole,
            arrived=time.perf_counter(),
            ready=torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None,
        )
        self._held.append(job)
        sends_now = self._settings.trigger == "async" and self._settings.clip_norm is None
        if sends_now or job.is_last:
            self._hand_over(self._held)
            self._held = []
        return job.future

    def _begin(self) -> None:
        if self.guard.closed:
            raise RuntimeError(_CLOSED)
        if self._ddp._join_config.enable:  # a rank that has joined would not take part in the exchange
            raise RuntimeError("ddp.join() is not possible with this hook; give every rank equally many batches")
        if self._unfinished and self._attached.optimizers and self._settings.scaler is not None:
            self.finish_step()  # the scaler has kept the optimizers from updating
        if self._unfinished:  # otherwise a lost rank or a non-finite gradient would go unnoticed
            raise RuntimeError(
                "the last backward() was not followed by optimizer.step(); accumulate gradients inside "
                "hook.no_sync(), and if an optimizer that was made later does the update, give it to hook.watch"
                if self._attached.optimizers
                else "step_ok() was not called after the last backward(); call it after each"
            )
        self._unfinished = True
        self._updated.clear()
        if self._settings.scaler is not None:
            self._scale = self._settings.scaler.scale(torch.ones((), device=self.transport.device))
        super().start_step(self._announced or self.step_of(self.guard.index, self.guard.epoch, self._settings.seed))
        self._announced = None
        self.guard.index += 1
        self._num_backwards += 1
        self._checks_weights = self._num_backwards == 2
        self._overflowed = False

    def _drop_if_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients of a skipped step, so that the optimizer changes nothing.

        Raises:
            RuntimeError: no gradient has come through DDP since this optimizer's last update.
            TransportError: a rank was lost or did not answer in time.
        """
        if self._unfinished or id(optimizer) in self._updated or not self._num_backwards:
            self.finish_step()
        self._updated.add(id(optimizer))
        if self._report.skipped or self._overflowed:
            for parameter in parameters_of(optimizer):
                parameter.grad = None

    def _why_not_exchanged(self) -> str | None:
        """Return a message about a parameter that is updated but not exchanged; None if there is no such parameter."""
        if reason := change_since_wrapping(self._ddp, self._kinds, may_freeze=True):
            return reason
        added = unknown_parameter(self._attached.optimizers, self._known | self._layer_of.keys())
        if added is None:
            return None
        return (
            f"a parameter of shape {list(added.shape)} that DDP does not exchange was added to an optimizer; put it "
            "into the model first, then wrap the model in DDP"
        )

    def _why_missing(self, *, has_begun: bool) -> str:
        call = "optimizer.step()" if self._attached.optimizers else "step_ok()"
        return why_missing(self._ddp, self._kinds, self.layers, call, has_begun=has_begun)

    def _hand_over(self, jobs: list[_Job]) -> None:
        # an empty list ends the communication thread
        self._jobs.put(jobs)
        self._bell.ring()

    def _serve(self) -> None:
        """Process jobs in the communication thread, until the queue yields an empty list.

        Sending a new bucket has priority over receiving and decoding earlier ones, so that the link is not idle.
        """
        under_way: collections.deque[_Job] = collections.deque()
        finished: list[_Job] = []
        closing = False
        while under_way or not closing:
            self._bell.silence()
            if not under_way or not self._jobs.empty():
                jobs = self._jobs.get()
                if jobs and self._settings.trigger == "sync":
                    with mark("exchange"):
                        self._attempt(lambda: await_command(self.transport))
                if jobs:
                    self._attempt(functools.partial(self._unscale_and_clip, jobs))
                if jobs and self._checks_weights:
                    self._attempt(self._compare_weights)
                for job in jobs:
                    self._attempt(functools.partial(self._start, job))
                under_way += jobs
                closing = closing or not jobs
                jobs = []
                continue
            with self.transport.interrupted_by(self._bell):
                self._attempt(under_way[0].pending.wait)
            if not self._bell.is_ringing:
                job = under_way.popleft()
                self._attempt(functools.partial(self._finish, job))
                finished.append(job)
                if self._scale is None or job.is_last:  # only then it is known whether a gradient overflowed
                    for each in finished:
                        self._rescale(each.buffer)
                        each.future.set_result(each.buffer)  # with its updates, unless something failed
                    finished.clear()
                    del each
                del job  # it holds payloads

    def _attempt(self, work: Callable[[], object]) -> None:
        """Call `work`, a part of the exchange, unless an earlier part failed; `finish_step` raises the first error."""
        if self._failure is not None:
            return
        started = time.perf_counter()
        try:
            work()
        except Exception as error:  # noqa: BLE001 - finish_step raises it
            self._failure = error
        self._report.exchange_s = (self._report.exchange_s or 0.0) + time.perf_counter() - started

    def _unscale_and_clip(self, jobs: Sequence[_Job]) -> None:
        """Divide gradients by the scaler's scale, so that residuals do not contain the scale; then clip them."""
        for job in jobs:
            if job.ready is not None:
                self._stream = self._stream or torch.cuda.Stream(job.buffer.device)
                torch.cuda.set_stream(self._stream)
                self._stream.wait_event(job.ready)
            if self._scale is not None:
                job.buffer.div_(self._scale)
        if self._settings.clip_norm is not None:  # then `jobs` are all buckets of the step
            factor = clip_factor([job.buffer for job in jobs], self._settings.clip_norm)
            if factor < 1:
                for job in jobs:
                    job.buffer.mul_(factor)

    def _start(self, job: _Job) -> None:
        if self._ddp.find_unused_parameters:
            self._leave_out_zeros(job)
        job.pending = self.reducer.start(job, self.collective.start, self.transport)
        # The vote is sent right after the last message, so that it costs no extra round trip.
        if job.is_last:
            self._any_nonfinite = self.guard.start_vote(self.start_on_any_rank)

    def _compare_weights(self) -> None:
        self._checks_weights = False
        self._difference = self.difference_of_weights(self._attached.optimizers)

    def _leave_out_zeros(self, job: _Job) -> None:
        """Remove from a bucket the layers whose gradients are zero on all ranks, so that nothing is sent for them.

        DDP hands over zeros for a layer without a gradient, and ignores the update of a layer that no rank used.
        """
        flags = torch.stack([gradient.any() for gradient in job.gradients]).tolist()
        used = self.transport.start_all_reduce_scalars(list(map(float, flags)), "max")()
        for update, flag in zip(job.updates, used, strict=True):
            if not flag:
                update.zero_()
        part = job.part([index for index, flag in enumerate(used) if flag])
        job.layers, job.gradients, job.updates = part.layers, part.gradients, part.updates

    def _finish(self, job: _Job) -> None:
        job.pending.finish()
        self._report.encoded += job.encoded
        self._report.encode_s = (self._report.encode_s or 0.0) + job.encode_s
        if job.is_last:
            self._conclude()
            self._report.exposed_s = time.perf_counter() - job.arrived

    def _rescale(self, buffer: torch.Tensor) -> None:
        if self._overflowed:
            buffer.fill_(math.inf)
        elif self._scale is not None:
            buffer.mul_(self._scale)

    def _conclude(self) -> None:
        with mark("exchange"):
            is_nonfinite = self._any_nonfinite()
        self.conclude(is_nonfinite=is_nonfinite)
        # The scaler must see the overflow on every rank, because it then skips the step and lowers its scale.
        self._overflowed = is_nonfinite and self._settings.scaler is not None
        self._report.skipped = is_nonfinite and not self._overflowed


@dataclasses.dataclass(kw_only=True)
class OwnHook(DdpHook):
    """Base of the compressors that have their own `CompressionHook`, such as `auto`, which uses other compressors."""

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return None

    @abc.abstractmethod
    def make_hook(
        self, ddp: DistributedDataParallel, collective: Collective, settings: HookSettings
    ) -> CompressionHook:
        """Create this compressor's hook, register it with `ddp` and return it; every rank must call this method."""


def _end_thread(thread: threading.Thread, jobs: queue.SimpleQueue[list[_Job]], bell: WakeupEvent) -> None:
    """End the communication thread of a hook that was not closed, unless it waits for another rank."""
    jobs.put([])
    bell.ring()
    thread.join(timeout=1)


def _refuse_backward(_: nn.Module, __: object, output: object) -> None:
    # a forward hook that makes `backward` raise, because gradients are no longer exchanged
    for tensor in _find_tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(_raise_closed)


def _raise_closed(_: torch.Tensor) -> None:
    raise RuntimeError(_CLOSED)
