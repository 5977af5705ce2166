"""CompressionHook: a reducer and a collective at work as the communication hook of a model in DDP.

DDP hands buckets over while backward goes on; a thread of the hook's own exchanges them in that order. A failure in the
thread is kept for whoever waits for the step, and every open Future is completed with its own buffer: an exception in a
Future surfaces garbled, an unset one hangs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import queue
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from typing_extensions import override

from collectives.base import Collective
from collectives.transport.base import WakeupEvent
from compressors.ddp.communicator import (
    CompressedCommunicator,
    Nonfinite,
    Trigger,
    await_command,
    is_finite,
    own_transport,
    zero_nonfinite_,
)
from compressors.ddp.reduced import change_since_wrapping, reduced_layers
from compressors.ddp.reducer import DONE, PendingReduction, Reducer
from compressors.ddp.report import Bucket, StepReport
from compressors.layer import Step

# Elements; a copy of fewer takes no longer than the call that saves it.
WORTH_TAKING = 1 << 15


class ZeroCopyGradients:
    """The gradients of a backward that are still to be exchanged.

    Taken is what lies on a CPU: on a GPU a copy is cheap, and memory is not. What DDP does not exchange, as inside
    `no_sync`, and what is added to a gradient that is there already go their usual way, and so does what a hook behind
    the accumulation wants to see, if `register_post_accumulate_grad_hook` made it: others find the place of a gradient
    that was taken, and in it what was there before.

    Args:
        ddp: with gradient_as_bucket_view; of one without it, no gradient is taken.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._taken: dict[nn.Parameter, torch.Tensor] = {}
        self._places: dict[nn.Parameter, torch.Tensor] = {}
        self._is_expected = False
        self._handles = [ddp.register_forward_pre_hook(self._expect)] if ddp.gradient_as_bucket_view else []
        for parameter in ddp.module.parameters() if ddp.gradient_as_bucket_view else ():
            if parameter.requires_grad and parameter.numel() >= WORTH_TAKING and parameter.device.type == "cpu":
                # Where gradients are accumulated: `torch.autograd.grad` does not come by, tensors' own hooks have been.
                accumulates = get_gradient_edge(parameter).node
                self._handles.append(accumulates.register_prehook(functools.partial(self._take, parameter)))

    def of(self, bucket: dist.GradBucket) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # type: ignore[name-defined]
        """(a bucket's gradients, flat, some of which nobody may change; where their updates go)."""
        parameters, places = bucket.parameters(), bucket.gradients()
        self._places.update(zip(parameters, places, strict=True))
        self._is_expected &= not bucket.is_last()
        updates = [place.flatten() for place in places]
        taken = [self._taken.pop(parameter, None) for parameter in parameters]
        if not any(gradient is not None for gradient in taken):
            return updates, updates
        gradients = [
            update if gradient is None else gradient.view(-1) for gradient, update in zip(taken, updates, strict=True)
        ]
        return gradients, updates

    def close(self) -> None:
        """Let gradients go their usual way again."""
        for handle in self._handles:
            handle.remove()
        self._taken.clear()
        self._places.clear()

    def _expect(self, *_: Any) -> None:
        """Before forward: whether DDP will exchange what the next backward makes."""
        self._is_expected = self._ddp.require_backward_grad_sync and torch.is_grad_enabled()

    def _take(self, parameter: nn.Parameter, gradients: tuple[torch.Tensor | None]) -> tuple[torch.Tensor] | None:
        """Before a gradient is accumulated: what is to be instead, or None."""
        (gradient,), place = gradients, self._places.get(parameter)
        if (first := self._taken.pop(parameter, None)) is not None and place is not None:
            place.copy_(first)  # another is added to it now, as a static graph allows
            return None
        if (
            gradient is None
            or place is None
            or not self._is_expected
            or torch.is_grad_enabled()
            or parameter.grad is not None
            or parameter._post_accumulate_grad_hooks
            or gradient.dtype != place.dtype
            or not (gradient.is_contiguous() and parameter.is_contiguous())  # places have the parameters' own strides
        ):
            return None
        self._taken[parameter] = gradient
        return (place.detach(),)  # a view of its own: autograd would copy one that others hold as well


_CLOSED = "the communication hook of this model is closed; wrap it in DDP anew"


class NonFiniteGradient(RuntimeError):
    """A gradient held NaN or infinity and the run asked to stop at that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookSettings:
    """What a hook is told whatever its pair.

    Attributes:
        seed: of the compressor's private random generators, the same on every rank.
        trigger: "async" sends each bucket while backward goes on, "sync" when rank 0 saw all ranks finish backward.
        nonfinite: what to do about NaN or infinity: "skip" the step on all ranks, "raise", or "zero" the elements.
        timeout_s: longest wait for any one message, in seconds.
    """

    seed: int
    trigger: Trigger
    nonfinite: Nonfinite
    timeout_s: float


@dataclasses.dataclass(kw_only=True, eq=False)
class _Job:
    """One bucket on its way through the communication thread.

    Attributes:
        future: completed with `buffer` once that holds the updates.
        buffer: all gradients of the bucket, 1-D, but for those that were taken.
        bucket: its layers; their updates are parts of the buffer.
        is_last: of this step.
        arrived: when DDP handed it over, in seconds of `time.perf_counter`.
        ready: on a GPU, when the gradients will be there.
        pending: the exchange, once it is under way.
    """

    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    bucket: Bucket
    is_last: bool
    arrived: float
    ready: torch.cuda.Event | None
    pending: PendingReduction = DONE


class CompressionHook(CompressedCommunicator):
    """A pair at work as a model's communication hook; made by `attach`. A channel that DDP hands buckets to.

    After the last bucket the ranks agree whether all gradients were finite, and what the reducer and the collective
    propose is accepted or dropped on all of them alike.

    Attributes:
        layers: every parameter that DDP reduces.
        reducer, collective, transport: the parts; only the communication thread uses them while a step goes on.
    """

    def __init__(
        self, ddp: DistributedDataParallel, reducer: Reducer, collective: Collective, settings: HookSettings
    ) -> None:
        transport = own_transport(next(ddp.parameters()).device, settings.timeout_s, ddp.process_group)
        super().__init__(reduced_layers(ddp), reducer, collective, transport)
        self._ddp = ddp
        self._settings = settings
        self._held: list[_Job] = []  # by the sync trigger, until backward ends
        self._jobs: queue.SimpleQueue[list[_Job]] = queue.SimpleQueue()
        self._bell = WakeupEvent()  # rung behind each job
        self._failure: Exception | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._serve, name="exchange", daemon=True)
        self._thread.start()
        # DDP inspects annotations of the hook and cannot read postponed ones; a lambda has none.
        ddp.register_comm_hook(None, lambda _, bucket: self._take(bucket))
        self._taken = ZeroCopyGradients(ddp)
        self._layer_of = {id(layer.weight): layer for layer in self.layers}
        self._index = 0
        self._epoch: int | None = None
        self._announced: Step | None = None
        self._epoch_is_missing = reducer.compressor.denser_epochs > 0
        self._unfinished = False
        self._is_whole = False  # the last bucket has arrived, and nobody has asked since
        self._closed = False
        self._saw_nonfinite = False
        self._any_nonfinite: Callable[[], bool] = lambda: False

    def set_epoch(self, epoch: int) -> None:
        """Tell how many epochs are finished: what the warm-up of the density follows.

        Without it, compressors work at full compression from the first step, and one that has a warm-up says so.
        """
        self._epoch = epoch
        self._epoch_is_missing = False

    def start_step(self, step: Step) -> None:
        """Tell where the next `backward` is in training, instead of having the steps counted."""
        self._announced = step
        self._epoch_is_missing = False

    def end_pause(self) -> None:
        """Tell that what went on since the last step, an evaluation say, is no part of the next one's time."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate: what goes forward and `backward` inside adds to the gradients, and nothing is sent.

        The first `backward` outside compresses and exchanges the sum, once; residuals are touched there alone, and
        `step_ok` is asked after it and not inside.
        """
        return cast("AbstractContextManager[None]", self._ddp.no_sync())

    def step_ok(self) -> bool:
        """Return whether to call `optimizer.step()`; ask once per step. False: a rank's gradient was not finite.

        Raises:
            TransportError: a rank was lost or did not answer in time.
            NonFiniteGradient: a gradient was not finite, and `nonfinite` is "raise".
            RuntimeError: DDP has not handed over all gradients since the last call, so ranks would drift apart.
        """
        return not self.finish_step().skipped

    def finish_step(self) -> StepReport:
        """Return what the exchange did in the last `backward`; raises as `step_ok` does."""
        has_begun, is_whole = self._unfinished, self._is_whole
        self._unfinished = self._is_whole = False
        if self._failure is not None:
            raise self._failure
        if not is_whole:
            raise RuntimeError(self._why_missing(has_begun=has_begun))
        if self._epoch_is_missing and self.transport.rank == 0:
            compressor = self.reducer.compressor
            warnings.warn(
                f"{compressor.component_name} sends more in its first {compressor.denser_epochs} epochs only if "
                "hook.set_epoch(epoch) is called before each; call it, or give warmup_epochs=0",
                stacklevel=3,
            )
        self._epoch_is_missing = False
        return self._report

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step": self._index, **super().state_dict()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._index = state["step"]
        super().load_state_dict(state)

    def close(self) -> None:
        """Stop the thread, and release the process group and what the collective holds; every rank must call.

        The model cannot go `backward` through DDP afterwards; wrap it anew to train on. Closed again, it stays closed.
        """
        if self._closed:
            return
        self._closed = True
        self._hand_over([])
        self._thread.join()
        self._bell.close()
        self._taken.close()
        # Else this DDP's buckets would also take what a new DDP over the same model computes.
        self._ddp._remove_autograd_hooks()
        self._ddp.register_forward_hook(_refuse_backward)
        super().close()
        # DDP's own reducer holds the hook, unseen by Python's collector: both would hold each other for ever.
        del self._taken, self._ddp

    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """DDP's hook; runs in autograd's thread and only hands the bucket over."""
        if bucket.index() == 0:
            self._begin()
        buffer = bucket.buffer()
        on_cuda = buffer.device.type == "cuda"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] if on_cuda else None)
        layers = [self._layer_of[id(parameter)] for parameter in bucket.parameters()]
        gradients, updates = self._taken.of(bucket)
        of_step = Bucket(layers=layers, gradients=gradients, updates=updates, step=self._step)
        of_step.screen = functools.partial(self._screen, of_step, buffer)
        self._is_whole = bucket.is_last()
        self._held.append(
            _Job(
                future=future,
                buffer=buffer,
                bucket=of_step,
                is_last=bucket.is_last(),
                arrived=time.perf_counter(),
                ready=torch.cuda.current_stream(buffer.device).record_event() if on_cuda else None,
            )
        )
        if self._settings.trigger == "async" or bucket.is_last():
            self._hand_over(self._held)
            self._held = []
        return future

    def _begin(self) -> None:
        """Start a step, with the first bucket that `backward` completes."""
        if self._closed:
            raise RuntimeError(_CLOSED)
        if self._ddp._join_config.enable:  # who has joined makes no step of the protocol
            raise RuntimeError("ddp.join() is not possible with this hook; give every rank as many batches")
        if self._unfinished:  # else a lost rank or a gradient that is not finite would pass unseen
            raise RuntimeError("step_ok() was not called after the last backward(); call it after each")
        self._unfinished = True
        self._begin_step(
            self._announced
            or Step(
                index=self._index,
                epoch=self._epoch or 0,
                rank=self.transport.rank,
                world_size=self.transport.world_size,
                seed=self._settings.seed,
                warmup=self._epoch is not None,
            )
        )
        self._announced = None
        self._index += 1
        self._saw_nonfinite = False

    def _why_missing(self, *, has_begun: bool) -> str:
        """Say why DDP has handed over no gradient, or not all of them, since a step was last asked for."""
        if self._closed:
            return _CLOSED
        if reason := change_since_wrapping(self._ddp):
            return reason
        without = [layer.name for layer in self.layers if layer.weight is not None and layer.weight.grad is None]
        if has_begun or 0 < len(without) < len(self.layers):
            name = without[0] if without else "some parameter"
            return (
                f"backward() gave {name} no gradient, so DDP did not finish; "
                "wrap the model with find_unused_parameters=True"
            )
        return (
            "no gradient came through DDP since the last step_ok(); call ddp(x), not model(x), leave the last "
            "backward() of a step outside no_sync(), and ask once per step"
        )

    def _hand_over(self, jobs: list[_Job]) -> None:
        """Give the communication thread something to do, whatever it waits for; nothing to do ends it."""
        self._jobs.put(jobs)
        self._bell.ring()

    def _serve(self) -> None:
        """The communication thread, until it is given nothing to do.

        A bucket that waits to be sent comes before one that is still to come or to be decoded, so that the link does
        not idle.
        """
        under_way: collections.deque[_Job] = collections.deque()
        closing = False
        while under_way or not closing:
            self._bell.silence()
            if not under_way or not self._jobs.empty():
                jobs = self._jobs.get()
                self._launch(jobs)
                under_way += jobs
                closing = closing or not jobs
                continue
            with self.transport.interrupted_by(self._bell):
                self._attempt(under_way[0].pending.wait)
            if not self._bell.is_ringing:
                self._land(under_way.popleft())

    def _launch(self, jobs: list[_Job]) -> None:
        """Encode buckets and send them off."""
        if jobs and self._settings.trigger == "sync":
            self._attempt(lambda: await_command(self.transport))
        for job in jobs:
            self._attempt(functools.partial(self._start, job))

    def _land(self, job: _Job) -> None:
        """Hand a bucket back, with the mean of what all ranks sent unless something failed."""
        self._attempt(functools.partial(self._finish, job))
        job.future.set_result(job.buffer)

    def _attempt(self, work: Callable[[], object]) -> None:
        """Do a part of the exchange unless one has failed; a failure is kept for whoever waits for the step."""
        if self._failure is not None:
            return
        started = time.perf_counter()
        try:
            work()
        except Exception as error:  # noqa: BLE001 - kept for whoever waits for the step
            self._failure = error
        self._report.exchange_s = (self._report.exchange_s or 0.0) + time.perf_counter() - started

    def _start(self, job: _Job) -> None:
        if job.ready is not None:
            self._stream = self._stream or torch.cuda.Stream(job.buffer.device)
            torch.cuda.set_stream(self._stream)
            self._stream.wait_event(job.ready)
        job.pending = self.reducer.start(job.bucket, self.collective.start, self.transport)
        # Asked behind the last message, so that no round trip comes after it.
        if job.is_last and self._settings.nonfinite != "zero":
            self._any_nonfinite = self.start_on_any_rank(self._saw_nonfinite)

    def _finish(self, job: _Job) -> None:
        job.pending.finish()
        self._report.encoded += job.bucket.encoded
        self._report.encode_s = (self._report.encode_s or 0.0) + job.bucket.encode_s
        if job.is_last:
            self._conclude()
            self._report.exposed_s = time.perf_counter() - job.arrived

    def _screen(self, bucket: Bucket, buffer: torch.Tensor) -> bool:
        """Keep NaN and infinity away from the compressor: residuals would never recover."""
        is_laid_down = bucket.is_laid_down
        if not is_laid_down and all(map(is_finite, bucket.gradients)):
            return False
        bucket.lay_down()
        self._saw_nonfinite |= zero_nonfinite_(buffer, self._settings.nonfinite)
        return not is_laid_down

    def _conclude(self) -> None:
        """Accept the step on all ranks, or drop it on all of them."""
        self._report.skipped = self._any_nonfinite()
        if self._report.skipped:
            self.drop()
        else:
            self.commit()
        if self._report.skipped and self._settings.nonfinite == "raise":
            raise NonFiniteGradient(f"a gradient was not finite at step {self._step.index}")


def _refuse_backward(_: nn.Module, __: object, output: object) -> None:
    """Make `backward` through what DDP returned an error, for its gradients are exchanged no more; a forward hook."""
    for tensor in _find_tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(_raise_closed)


def _raise_closed(_: torch.Tensor) -> None:
    raise RuntimeError(_CLOSED)
