"""Attach: a compressor and a collective as the communication hook of your own DistributedDataParallel, in one call.

    ddp = DistributedDataParallel(model)
    hook = attach(ddp, GroupTopK(ratio=0.01), Ring())
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
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.base import Collective
from collectives.payloads.base import Payload
from collectives.transport.base import Purpose, Traffic
from collectives.transport.process_group import ProcessGroupTransport
from compressors.base import Compressor
from compressors.ddp.communication_thread import Exchange, Nonfinite, Outcome, Trigger
from compressors.layer import Step, layers_of
from compressors.pairs import refusal
from compressors.state import Key

# DDP closes its first bucket at this size unless it is given one for all (bucket_cap_mb).
FIRST_BUCKET_BYTES = 1 << 20


def attach(
    ddp: DistributedDataParallel,
    compressor: Compressor,
    collective: Collective,
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
        compressor: with its options; keeps this rank's residuals from now on.
        collective: how payloads are summed.
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
    """
    if reason := refusal(compressor, collective):
        raise ValueError(reason)
    if compressor.engine_hook:
        raise ValueError(
            f"{compressor.component_name} is PyTorch's own hook; "
            "use ddp.register_comm_hook(*compressor.hook(ddp.process_group))"
        )
    _check_one_bucket(ddp, compressor)
    _hand_over_momentum(compressor, momentum, nesterov)
    return CompressionHook(
        ddp, compressor, collective, seed=seed, trigger=trigger, nonfinite=nonfinite, timeout_s=timeout_s
    )


class CompressionHook:
    """A pair at work as a model's communication hook; made by `attach`.

    Attributes:
        layers: every trainable parameter.
        collective, exchange, transport: the parts, bound to each other.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        compressor: Compressor,
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
        self.collective = collective.bind(self.transport)
        # DDP inspects annotations of the hook and cannot read postponed ones; a lambda has none.
        ddp.register_comm_hook(None, lambda _, bucket: self._hook(bucket))
        self.exchange = Exchange(
            compressor, self.collective, self.transport, self.layers, trigger=trigger, nonfinite=nonfinite
        )
        self._seed = seed
        self._index = 0
        self._epoch: int | None = None
        self._announced: Step | None = None
        self._unfinished = False
        self._closed = False

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

    def finish_step(self) -> Outcome:
        """What the exchange did in the last `backward`; raises as `step_ok` does."""
        self._unfinished = False
        return self.exchange.finish_step()

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Messages and bytes that this rank has sent so far, per purpose."""
        return self.transport.traffic

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """What this rank encoded in its last step, by the ids of the layers in it."""
        return self.exchange.compressor.last_encoded

    def residual_norms(self) -> dict[int, float]:
        """L2 norm of what each layer has not sent yet, by layer id."""
        return self.exchange.compressor.residual_norms()

    def state_dict(self) -> dict[str, Any]:
        """All that training needs to go on bit for bit; differs between ranks, so save one per rank."""
        return {
            "step": self._index,
            "compressor": self.exchange.compressor.state_dict(),
            "collective": self.collective.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._index = state["step"]
        self.exchange.compressor.load_state_dict(state["compressor"])
        self.collective.load_state_dict(state["collective"])

    def close(self) -> None:
        """Stop the communication thread and release what the collective holds; every rank must call.

        The model cannot go `backward` through DDP afterwards; wrap it anew to train on.
        """
        self._closed = True
        self.exchange.close()
        self.collective.close()

    def _hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        if bucket.index() == 0:
            self._begin()
        return self.exchange.hook(bucket)

    def _begin(self) -> None:
        """Start a step; runs in autograd's thread with the first bucket that `backward` completes."""
        if self._closed:
            raise RuntimeError("the communication hook of this model is closed; wrap it in DDP anew")
        if self._unfinished:  # else a lost rank or a gradient that is not finite would pass unseen
            raise RuntimeError("step_ok() was not called after the last backward(); call it after each")
        self._unfinished = True
        self.exchange.start_step(self._announced or self._counted())
        self._announced = None
        self._index += 1

    def _counted(self) -> Step:
        return Step(
            index=self._index,
            epoch=self._epoch or 0,
            rank=self.transport.rank,
            world_size=self.transport.world_size,
            seed=self._seed,
            warmup=self._epoch is not None,
        )


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


def _hand_over_momentum(compressor: Compressor, momentum: float | None, nesterov: bool) -> None:
    name = compressor.component_name
    if compressor.owns_momentum:
        if momentum is None or not 0 <= momentum < 1:
            raise ValueError(
                f"{name} applies the momentum itself under these options; give attach its coefficient in [0, 1), "
                "momentum=0.9 say, and the optimizer momentum=0"
            )
        compressor.take_over_momentum(momentum, nesterov=nesterov)
    elif momentum is not None:
        raise ValueError(f"{name} applies no momentum under these options; leave momentum to the optimizer")
