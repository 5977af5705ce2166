"""Attach: a compressor and a collective as the communication hook of your own DistributedDataParallel, in one call.

    ddp = DistributedDataParallel(model)
    hook = attach(ddp, "group_topk:ratio=0.01", "ring")
    for x, y in batches:
        loss_of(ddp(x), y).backward()
        if hook.step_ok():
            optimizer.step()
        optimizer.zero_grad()
    hook.close()

`examples/train_digits.py` is a whole script.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.base import Collective, Key
from collectives.payloads.base import Payload
from collectives.spec import build
from collectives.transport.base import Purpose, Traffic
from collectives.transport.process_group import ProcessGroupTransport
from compressors.base import Compressor
from compressors.ddp.bucket import Bucket
from compressors.ddp.communication_thread import CommunicationThread, Job, Trigger
from compressors.ddp.downlink import Downlink
from compressors.ddp.reducer import Reducer
from compressors.ddp.report import StepReport
from compressors.layer import Step, layers_of

# DDP closes its first bucket at this size unless it is given one for all (bucket_cap_mb).
FIRST_BUCKET_BYTES = 1 << 20

Nonfinite = Literal["skip", "raise", "zero"]


class NonFiniteGradient(RuntimeError):
    """A gradient held NaN or infinity and the run asked to stop at that."""


def attach(
    ddp: DistributedDataParallel,
    compressor: Compressor | str,
    collective: Collective | str,
    *,
    seed: int = 0,
    momentum: float | None = None,
    nesterov: bool = False,
    trigger: Trigger = "async",
    nonfinite: Nonfinite = "skip",
    timeout_s: float = 300.0,
) -> CompressionHook:
    """Let `ddp` exchange its gradients through this pair from the next `backward` on; every rank must call.

    Args:
        ddp: the wrapped model; has no communication hook yet.
        compressor: with its options, or as a text: "group_topk:ratio=0.01".
        collective: how payloads are summed; likewise.
        seed: of the compressor's private random generators, the same on every rank.
        momentum: coefficient for compressors that apply the momentum themselves (`momentum_correction=True`), in
            [0, 1); the optimizer's own must then be 0.
        nesterov: look ahead along the velocity, as the optimizer would.
        trigger: "async" sends each bucket while backward goes on, "sync" when rank 0 saw all ranks finish backward.
        nonfinite: what to do about NaN or infinity: "skip" the step on all ranks, "raise", or "zero" the elements.
        timeout_s: longest wait for any one message.

    Raises:
        ValueError: "topk sends Sparse payloads: native adds ...; use collective allgather"; momentum missing or given
            in vain; several buckets where the compressor wants one; or a hook of PyTorch's own.
        OptionError: a text that names no component, or a wrong option.
    """
    if isinstance(compressor, str):
        compressor = build("compressors", Compressor, compressor)
    if isinstance(collective, str):
        collective = build("collectives", Collective, collective)
    if reason := compressor.refusal(collective):
        raise ValueError(reason)
    if compressor.engine_hook:
        raise ValueError(
            f"{compressor.component_name} is PyTorch's own hook; "
            "use ddp.register_comm_hook(*compressor.hook(ddp.process_group))"
        )
    _check_one_bucket(ddp, compressor)
    _check_momentum(compressor, momentum)
    return CompressionHook(
        ddp,
        Reducer(compressor, momentum=momentum or 0.0, nesterov=nesterov),
        collective,
        seed=seed,
        trigger=trigger,
        nonfinite=nonfinite,
        timeout_s=timeout_s,
    )


class CompressionHook:
    """A pair at work as a model's communication hook; made by `attach`.

    After the last bucket the ranks agree whether all gradients were finite, and what the reducer and the collective
    propose is accepted or dropped on all of them alike.

    Attributes:
        layers: every trainable parameter.
        reducer, collective, transport: the parts; only the communication thread uses them while a step goes on.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        reducer: Reducer,
        collective: Collective,
        *,
        seed: int,
        trigger: Trigger,
        nonfinite: Nonfinite,
        timeout_s: float,
    ) -> None:
        self.layers = layers_of(ddp.module)
        device = next(ddp.parameters()).device
        self.transport = ProcessGroupTransport(_own_group(ddp, device, timeout_s), device, timeout_s=timeout_s)
        self.reducer = reducer
        self._downlink = Downlink(reducer.compressor, self.layers)
        self.collective = collective.bind(self.transport, self._downlink)
        self._thread = CommunicationThread(self._work, self.transport, trigger)
        # DDP inspects annotations of the hook and cannot read postponed ones; a lambda has none.
        ddp.register_comm_hook(None, lambda _, bucket: self._take(bucket))
        self._layer_of = {id(layer.weight): layer for layer in self.layers}
        self._nonfinite = nonfinite
        self._seed = seed
        self._index = 0
        self._epoch: int | None = None
        self._announced: Step | None = None
        self._step = self._downlink.step
        self._unfinished = False
        self._closed = False
        self._report = StepReport()
        self._saw_nonfinite = False

    def set_epoch(self, epoch: int) -> None:
        """Tell how many epochs are finished: what the warm-up of the density follows.

        Without it, compressors work at full compression from the first step.
        """
        self._epoch = epoch

    def start_step(self, step: Step) -> None:
        """Tell where the next `backward` is in training, instead of having the steps counted."""
        self._announced = step

    def step_ok(self) -> bool:
        """Whether to call `optimizer.step()`; ask after every `backward`. False: a rank's gradient was not finite.

        Raises:
            TransportError: a rank was lost or did not answer in time.
            NonFiniteGradient: a gradient was not finite, and `nonfinite` is "raise".
        """
        return not self.finish_step().skipped

    def finish_step(self) -> StepReport:
        """Return what the exchange did in the last `backward`; raises as `step_ok` does."""
        self._unfinished = False
        if self._thread.failure is not None:
            raise self._thread.failure
        return self._report

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Messages and bytes that this rank has sent so far, per purpose."""
        return self.transport.traffic

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """What this rank encoded in its last step, by the ids of the layers in it; see `Reducer`."""
        return self.reducer.last_encoded

    def residual_norms(self) -> dict[int, float]:
        """Return the L2 norm of what each layer has not sent yet, by layer id."""
        return self.reducer.residual_norms()

    def state_dict(self) -> dict[str, Any]:
        """Return all that training needs to go on bit for bit; differs between ranks, so save one per rank."""
        return {
            "step": self._index,
            "reducer": self.reducer.state_dict(),
            "collective": self.collective.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace everything by what `state_dict` gave."""
        self._index = state["step"]
        self.reducer.load_state_dict(state["reducer"])
        self.collective.load_state_dict(state["collective"])

    def close(self) -> None:
        """Stop the communication thread and release what the collective holds; every rank must call.

        The model cannot go `backward` through DDP afterwards; wrap it anew to train on.
        """
        self._closed = True
        self._thread.close()
        self.collective.close()

    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """DDP's hook; runs in autograd's thread and only hands the bucket over."""
        if bucket.index() == 0:
            self._begin()
        buffer = bucket.buffer()
        on_cuda = buffer.device.type == "cuda"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] if on_cuda else None)
        layers = [self._layer_of[id(parameter)] for parameter in bucket.parameters()]
        gradients = [gradient.flatten() for gradient in bucket.gradients()]
        self._thread.put(
            Job(
                future=future,
                buffer=buffer,
                bucket=Bucket(layers=layers, gradients=gradients, step=self._step),
                is_last=bucket.is_last(),
                arrived=time.perf_counter(),
                ready=torch.cuda.current_stream(buffer.device).record_event() if on_cuda else None,
            )
        )
        return future

    def _begin(self) -> None:
        """Start a step, with the first bucket that `backward` completes."""
        if self._closed:
            raise RuntimeError("the communication hook of this model is closed; wrap it in DDP anew")
        if self._unfinished:  # else a lost rank or a gradient that is not finite would pass unseen
            raise RuntimeError("step_ok() was not called after the last backward(); call it after each")
        self._unfinished = True
        self._step = self._downlink.step = self._announced or Step(
            index=self._index,
            epoch=self._epoch or 0,
            rank=self.transport.rank,
            world_size=self.transport.world_size,
            seed=self._seed,
            warmup=self._epoch is not None,
        )
        self._announced = None
        self._index += 1
        self._report = StepReport(encode_s=0.0, exchange_s=0.0)
        self._saw_nonfinite = False

    def _work(self, job: Job) -> None:
        """What the communication thread does with a bucket."""
        started = time.perf_counter()
        report = self._report
        self._screen(job.buffer)
        self.reducer.reduce(job.bucket, self.collective.sum, self.transport)
        report.encoded += job.bucket.encoded
        if job.is_last:
            self._conclude()
            report.exposed_s = time.perf_counter() - job.arrived
        report.encode_s = (report.encode_s or 0.0) + job.bucket.encode_s
        report.exchange_s = (report.exchange_s or 0.0) + time.perf_counter() - started

    def _screen(self, buffer: torch.Tensor) -> None:
        """Keep NaN and infinity away from the compressor: residuals would never recover."""
        if bool(torch.isfinite(buffer.sum())) or bool(torch.isfinite(buffer).all()):
            return
        if self._nonfinite == "zero":
            torch.nan_to_num_(buffer, nan=0.0, posinf=0.0, neginf=0.0)
        else:
            self._saw_nonfinite = True
            buffer.zero_()

    def _conclude(self) -> None:
        """Accept the step on all ranks, or drop it on all of them."""
        if self._nonfinite != "zero":
            (worst,) = self.transport.all_reduce_scalars([float(self._saw_nonfinite)], "max")
            self._report.skipped = bool(worst)
        for part in (self.reducer, self.collective):
            if self._report.skipped:
                part.drop()
            else:
                part.commit()
        if self._report.skipped and self._nonfinite == "raise":
            raise NonFiniteGradient(f"a gradient was not finite at step {self._step.index}")


def _own_group(ddp: DistributedDataParallel, device: torch.device, timeout_s: float) -> dist.ProcessGroup:
    """A group of the same ranks for the communication thread: two threads on one gloo group corrupt sums silently."""
    backends = dict(item.split(":") for item in dist.get_backend_config(ddp.process_group).split(","))
    group = dist.new_group(
        dist.get_process_group_ranks(ddp.process_group),
        timeout=datetime.timedelta(seconds=timeout_s),
        backend=backends[device.type],
        use_local_synchronization=ddp.process_group != dist.group.WORLD,
    )
    return cast(dist.ProcessGroup, group)


def _check_one_bucket(ddp: DistributedDataParallel, compressor: Compressor) -> None:
    nbytes = sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
    limit = FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    if compressor.one_bucket and nbytes > limit:
        raise ValueError(
            f"{compressor.component_name} wants the whole model as one bucket under these options; "
            f"wrap it with DistributedDataParallel(..., bucket_cap_mb={-(-nbytes // 2**20)})"
        )


def _check_momentum(compressor: Compressor, momentum: float | None) -> None:
    name = compressor.component_name
    if compressor.owns_momentum and (momentum is None or not 0 <= momentum < 1):
        raise ValueError(
            f"{name} applies the momentum itself under these options; give attach its coefficient in [0, 1), "
            "momentum=0.9 say, and the optimizer momentum=0"
        )
    if not compressor.owns_momentum and momentum is not None:
        raise ValueError(f"{name} applies no momentum under these options; leave momentum to the optimizer")
