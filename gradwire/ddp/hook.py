"""`CompressionHook`: the communication hook of a model in DDP, which reduces buckets in its own thread.

DDP hands buckets over during backward, and the thread exchanges them in that order. If the thread fails, `finish_step`
raises its exception, and every open Future is completed with its bucket's buffer: DDP reports an exception in a Future
with a garbled text, and hangs if a Future is never completed.
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
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from collectives.base import Collective
from collectives.transport.base import WakeupEvent
from compressors.base import DdpHook
from compressors.layer import Layer, Step
from compressors.parts.buckets import clip_factor, is_finite
from gradwire.attached import check_optimizers, parameters_of, unknown_parameter
from gradwire.ddp.gradients import ZeroCopyGradients, change_since_wrapping, reduced_kinds, reduced_layers
from gradwire.exchange.communicator import (
    CompressedCommunicator,
    Trigger,
    await_command,
    own_transport,
)
from gradwire.exchange.reducer import DONE, PendingReduction, Reducer
from gradwire.exchange.report import Bucket, StepReport
from gradwire.step_guard import Nonfinite, StepGuard

_CLOSED = "the communication hook of this model is closed; wrap the model in DDP again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookSettings:
    """Settings of a hook, independent of compressor and collective.

    Attributes:
        seed: seed of the compressor's own random numbers, the same on every rank.
        trigger: "async" sends each bucket during backward, "sync" after all ranks have finished backward.
        nonfinite: what to do about NaN or infinity: "skip" the step on all ranks, "raise", or "zero" the elements.
        timeout_s: longest wait for any one message, in seconds.
        scaler: gradients are divided by its scale before they are compressed, and multiplied afterwards.
        clip_norm: largest L2 norm of a rank's gradient, which is clipped before it is sent; None: not clipped.
    """

    seed: int
    trigger: Trigger
    nonfinite: Nonfinite
    timeout_s: float
    scaler: torch.amp.GradScaler | None = None
    clip_norm: float | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class _Job:
    """One bucket on its way through the communication thread.

    Attributes:
        future: completed with `buffer` once that holds the updates.
        buffer: DDP's 1-D buffer with all gradients of the bucket, except those that were taken.
        bucket: the bucket; its updates are views of `buffer`.
        is_last: True if it is the last bucket of this step.
        arrived: `time.perf_counter()` when DDP handed the bucket over.
        ready: on a GPU, the event after which the gradients are valid.
        pending: the exchange, once it has been started.
    """

    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    bucket: Bucket
    is_last: bool
    arrived: float
    ready: torch.cuda.Event | None
    pending: PendingReduction = DONE


class CompressionHook(CompressedCommunicator):
    """Exchange a model's gradients as its communication hook; `attach` creates it.

    After the last bucket the ranks agree whether all gradients were finite. The state that the reducer and the
    collective propose is then accepted on all ranks, or dropped on all ranks.

    Attributes:
        layers: every parameter that DDP reduces.
        reducer: compresses; only the communication thread uses `reducer`, `collective` and `transport` during a step.
        collective: sums the payloads.
        transport: connects the ranks.
    """

    def __init__(
        self, ddp: DistributedDataParallel, reducer: Reducer, collective: Collective, settings: HookSettings
    ) -> None:
        transport = own_transport(next(ddp.parameters()).device, settings.timeout_s, ddp.process_group)
        super().__init__(reduced_layers(ddp), reducer, collective, transport)
        self._ddp = ddp
        self._settings = settings
        self._held: list[_Job] = []  # with trigger "sync", until backward ends
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
        self._guard = StepGuard(settings.nonfinite)
        self._attached = self._guard.attach(ddp.module, self._why_not_exchanged, reducer.compressor, transport.rank)
        self._kinds = reduced_kinds(ddp)
        self._known: set[int] = set()  # ids of the parameters of optimizers when `watch` was given them
        self._handles: list[RemovableHandle] = []  # of these optimizers
        self._updated: set[int] = set()  # ids of the optimizers that have used the last exchanged gradients
        self._layer_of = {id(layer.weight): layer for layer in self.layers}
        self._announced: Step | None = None
        self._unfinished = self._is_whole = False  # has a bucket, or the last one, come since `finish_step`?
        self._overflowed = False
        self._scale: torch.Tensor | None = None  # a tensor, because reading it from a GPU would wait for the GPU
        self._num_backwards = 0
        self._checks_parameters = False
        self._difference = ""  # a warning about parameters that differ between ranks
        self._any_nonfinite: Callable[[], bool] = lambda: False

    def watch(self, *optimizers: torch.optim.Optimizer) -> None:
        """Let `step` of these optimizers change nothing in a skipped step, so that the loop need not call `step_ok`.

        Raises:
            ValueError: an optimizer does not call the hooks of its `step`.
        """
        check_optimizers(optimizers)
        self._attached.optimizers += optimizers
        self._known |= {id(parameter) for each in optimizers for parameter in parameters_of(each)}
        self._handles += [each.register_step_pre_hook(self._before_update) for each in optimizers]

    def set_epoch(self, epoch: int) -> None:
        """Set the number of finished epochs, which controls the density during the warm-up epochs.

        Without this call, a compressor skips its warm-up epochs, if it has any, and warns about that.
        """
        self._guard.set_epoch(epoch)

    def start_step(self, step: Step) -> None:
        """Set the training step of the next `backward`; by default the hook counts the steps itself."""
        self._announced = step
        self._guard.set_epoch(None)

    def end_pause(self) -> None:
        """Exclude the time since the last step, for example of an evaluation, from the next step's time."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients: `backward` inside this context adds to them and sends nothing.

        Run forward inside it too. The first `backward` outside compresses and exchanges the sum, and only it changes
        residuals. Call `step_ok` after that `backward`, not inside this context.
        """
        return cast("AbstractContextManager[None]", self._ddp.no_sync())

    def step_ok(self) -> bool:
        """Return True if `optimizer.step()` is to be called, or False if a rank's gradient was not finite.

        Call it once per step; with `optimizer` given to `attach` that is not necessary. With `scaler` it is always
        True, because the scaler skips the step.

        Raises:
            TransportError: a rank was lost or did not answer in time.
            NonFiniteGradient: a gradient was not finite, and `nonfinite` is "raise".
            RuntimeError: DDP has not handed over all gradients since the last call, so replicas would diverge.
        """
        return not self.finish_step().skipped

    def finish_step(self) -> StepReport:
        """Return the report of the exchange in the last `backward`; raises the same errors as `step_ok`."""
        has_begun, is_whole = self._unfinished, self._is_whole
        self._unfinished = self._is_whole = False
        if self._failure is not None:
            raise self._failure
        if not is_whole:
            raise RuntimeError(self._why_missing(has_begun=has_begun))
        self._guard.check()
        if self._difference and self.transport.rank == 0:
            warnings.warn(self._difference, stacklevel=3)
        self._difference = ""
        return self._report

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return all state that training needs to resume bit for bit; it differs between ranks, so save each rank's."""
        return {"step": self._guard.index, **super().state_dict()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the whole state with one that `state_dict` returned; load the model's weights first."""
        self._guard.index = state["step"]
        super().load_state_dict(state)

    @property
    def is_closed(self) -> bool:
        """Return True after `close`."""
        return self._guard.closed

    def close(self) -> None:
        """Stop the thread, and release the process group and the collective; every rank must call this method.

        Afterwards `backward` through this DDP model raises an error; wrap the model in DDP again to continue training.
        Later calls do nothing.
        """
        if self._guard.closed:
            return
        self._guard.closed = True
        self._at_exit.detach()
        self._hand_over([])
        self._thread.join()
        self._bell.close()
        self._taken.close()
        for handle in self._handles:
            handle.remove()
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
        layers = [self._layer_of[id(parameter)] for parameter in bucket.parameters()]
        gradients, updates = self._taken.of(bucket)
        of_step = Bucket(layers=layers, gradients=gradients, updates=updates, step=self._step)
        of_step.screen = functools.partial(self._screen, of_step, buffer)
        self._is_whole = bucket.is_last()
        job = _Job(
            future=torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None),
            buffer=buffer,
            bucket=of_step,
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
        if self._guard.closed:
            raise RuntimeError(_CLOSED)
        if self._ddp._join_config.enable:  # a rank that has joined would not take part in the exchange
            raise RuntimeError("ddp.join() is not possible with this hook; give every rank equally many batches")
        if self._unfinished and self._handles and self._settings.scaler is not None:
            self.finish_step()  # the scaler has kept the optimizers from updating
        if self._unfinished:  # otherwise a lost rank or a non-finite gradient would go unnoticed
            raise RuntimeError(
                "the last backward() was not followed by optimizer.step(); accumulate gradients inside "
                "hook.no_sync(), and if an optimizer that was made later does the update, give it to hook.watch"
                if self._handles
                else "step_ok() was not called after the last backward(); call it after each"
            )
        self._unfinished = True
        self._updated.clear()
        if self._settings.scaler is not None:
            self._scale = self._settings.scaler.scale(torch.ones((), device=self.transport.device))
        super().start_step(self._announced or self.step_of(self._guard.index, self._guard.epoch, self._settings.seed))
        self._announced = None
        self._guard.index += 1
        self._num_backwards += 1
        self._checks_parameters = self._num_backwards == 2
        self._overflowed = False

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Drop the gradients of a skipped step, after the closure if there is one: it runs backward.

        Args:
            optimizer: the optimizer whose `step` was called.
            args: positional arguments of `step`; the first one is the optimizer.
            kwargs: keyword arguments of `step`.

        Returns:
            The arguments to use instead; None to keep them.
        """
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._drop_if_skipped(optimizer)
            return None

        def checked() -> Any:
            loss = closure()
            self._drop_if_skipped(optimizer)
            return loss

        return (optimizer, checked), {}

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
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _why_not_exchanged(self) -> str | None:
        """Return a sentence about a parameter that is updated with gradients of this rank alone; None without one."""
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
        """Return a sentence for the user: why DDP has not handed over all gradients in this step, and what to do."""
        if self._guard.closed:
            return _CLOSED
        if reason := change_since_wrapping(self._ddp, self._kinds):
            return reason
        call = "optimizer.step()" if self._handles else "step_ok()"
        without = [layer.name for layer in self.layers if layer.weight is not None and layer.weight.grad is None]
        if has_begun or 0 < len(without) < len(self.layers):
            return (
                f"backward() gave {[*without, 'some parameter'][0]} no gradient, so DDP did not finish; "
                "wrap the model with find_unused_parameters=True"
            )
        return (
            f"no gradient came through DDP since the last {call}; call ddp(x), not model(x), leave the last "
            f"backward() of a step outside no_sync(), and call {call} once per step; if the network is trained without "
            "this hook now, call its close()"
        )

    def _hand_over(self, jobs: list[_Job]) -> None:
        # an empty list ends the communication thread
        self._jobs.put(jobs)
        self._bell.ring()

    def _serve(self) -> None:
        """Process jobs in the communication thread, until an empty list comes.

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
                    self._attempt(lambda: await_command(self.transport))
                if jobs:
                    self._attempt(functools.partial(self._unscale_and_clip, jobs))
                if jobs and self._checks_parameters:
                    self._attempt(self._compare_parameters)
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
        """Divide gradients by the scaler's scale, so that residuals have their true size, and clip them."""
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
            job.bucket = self._without_zero_layers(job)
        job.pending = self.reducer.start(job.bucket, self.collective.start, self.transport)
        # Sent right after the last message, so that no extra round trip follows.
        if job.is_last:
            self._any_nonfinite = self._guard.start_vote(self.start_on_any_rank)

    def _compare_parameters(self) -> None:
        """Compare the parameters after the first update over ranks, by checksums; keep a warning if some differ.

        Those that only the optimizers know have one checksum.
        """
        self._checks_parameters = False
        updated = {id(each): each for optimizer in self._attached.optimizers for each in parameters_of(optimizer)}
        unknown = sum(_checksum(each) for key, each in updated.items() if key not in self._layer_of)
        sums = [*(_checksum(cast(torch.Tensor, layer.weight)) for layer in self.layers), unknown % _MODULUS]
        names = [*(layer.name for layer in self.layers), "a parameter of an optimizer that is not in the model"]
        largest = self.transport.start_all_reduce_scalars([*sums, *(-each for each in sums)], "max")()
        differing = [
            name
            for name, high, low in zip(names, largest[: len(sums)], largest[len(sums) :], strict=True)
            if high != -low
        ]
        if differing:
            others = f" and {len(differing) - 1} more layers differ" if len(differing) > 1 else " differs"
            self._difference = (
                f"after the first update {differing[0]}{others} between ranks, which then train different models; "
                "begin with equal weights, and update them in the same way on every rank"
            )

    def _without_zero_layers(self, job: _Job) -> Bucket:
        """Return the bucket without the layers whose gradients are zero on all ranks; nothing is sent for these.

        DDP hands over zeros for a layer without a gradient, and ignores the update of a layer that no rank used.
        """
        flags = torch.stack([gradient.any() for gradient in job.bucket.gradients]).tolist()
        used = self.transport.start_all_reduce_scalars(list(map(float, flags)), "max")()
        for update, flag in zip(job.bucket.updates, used, strict=True):
            if not flag:
                update.zero_()
        part = job.bucket.part([index for index, flag in enumerate(used) if flag])
        part.screen = functools.partial(self._screen, part, job.buffer)
        job.bucket.screen = lambda: False  # see `_finish`
        return part

    def _finish(self, job: _Job) -> None:
        job.pending.finish()
        job.bucket.screen = lambda: False  # it refers to the bucket: the cycle would keep the bucket's tensors for long
        self._report.encoded += job.bucket.encoded
        self._report.encode_s = (self._report.encode_s or 0.0) + job.bucket.encode_s
        if job.is_last:
            self._conclude()
            self._report.exposed_s = time.perf_counter() - job.arrived

    def _rescale(self, buffer: torch.Tensor) -> None:
        if self._overflowed:
            buffer.fill_(math.inf)
        elif self._scale is not None:
            buffer.mul_(self._scale)

    def _screen(self, bucket: Bucket, buffer: torch.Tensor) -> bool:
        """Replace NaN and infinity in a bucket, so that they do not reach residuals.

        Return True if `bucket.gradients` now are other tensors: views of `buffer`.
        """
        lie_elsewhere = bucket.gradients is not bucket.updates
        if lie_elsewhere and all(map(is_finite, bucket.gradients)):
            return False
        for update, gradient in zip(bucket.updates, bucket.gradients, strict=True):
            if update is not gradient:  # which must not be changed
                update.copy_(gradient)
        bucket.gradients = bucket.updates
        self._guard.screen_([buffer])
        return lie_elsewhere

    def _conclude(self) -> None:
        """Accept the proposed state if all ranks' gradients were finite, otherwise drop it."""
        if not self._any_nonfinite():
            self.commit()
            return
        self.drop()
        # A scaler must see the overflow, on every rank: it skips the step and lowers its scale.
        self._overflowed = self._settings.scaler is not None
        self._report.skipped = not self._overflowed
        self._guard.skip(f"a gradient was not finite at step {self._step.index}")


@dataclasses.dataclass(kw_only=True)
class OwnHook(DdpHook):
    """Base of the compressors that have their own `CompressionHook`, such as `auto`, which sends through others."""

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return None

    @abc.abstractmethod
    def make_hook(
        self, ddp: DistributedDataParallel, collective: Collective, settings: HookSettings
    ) -> CompressionHook:
        """Register the hook with a model in DDP and return it; every rank must call this method."""


_MODULUS = 2**50  # fp64 holds all smaller integers exactly


def _checksum(parameter: torch.Tensor) -> float:
    # The sum of the bits as integers: one message compares all layers, and parameters stay on their device.
    flat = parameter.detach().contiguous().view(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return float(int(flat.view(integers).sum(dtype=torch.int64)) % _MODULUS)


def _end_thread(thread: threading.Thread, jobs: queue.SimpleQueue[list[_Job]], bell: WakeupEvent) -> None:
    """End the communication thread of a hook that was not closed, unless it waits for another rank."""
    jobs.put([])
    bell.ring()
    thread.join(timeout=1)


def _refuse_backward(_: nn.Module, __: object, output: object) -> None:
    # a forward hook: gradients are no longer exchanged
    for tensor in _find_tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(_raise_closed)


def _raise_closed(_: torch.Tensor) -> None:
    raise RuntimeError(_CLOSED)
