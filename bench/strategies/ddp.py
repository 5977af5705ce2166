"""DDP: every rank exchanges its gradients in every step, through PyTorch's DistributedDataParallel.

Source: Li et al., "PyTorch Distributed: Experiences on accelerating data parallel training" (VLDB 2020).
"""

import abc
import dataclasses
import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.errors import RunFailed
from bench.datasets.base import Dataset
from bench.optimizers.base import Optimizer
from bench.strategies.base import Batch, BoundStrategy, Exchange, Setup, Strategy
from collectives.allreduce import Native
from collectives.base import Collective
from collectives.refusals import Refusal
from collectives.transport.base import Purpose, Traffic
from compressors.base import Compressor, TorchHook
from compressors.floats import NoCompression
from compressors.layer import Layer, Step, layers_of, without_gradient
from gradwire.ddp.buckets import WHOLE_MODEL_MB, bucket_size, gradient_mb
from gradwire.ddp.hook import CompressionHook, OwnHook
from gradwire.exchange.communicator import (
    CompressedCommunicator,
    HookSettings,
    Trigger,
    await_command,
)
from gradwire.exchange.report import EncodedLayer, StepReport
from gradwire.optim.base import BoundOptimizer
from gradwire.step_guard import Nonfinite, StepGuard, are_finite


@dataclasses.dataclass(kw_only=True)
class Ddp(Strategy):
    """Registers the compressor and the collective as DDP's communication hook.

    The compressor `none` with the collective `native` and the async trigger means plain DDP, without a hook of this
    project. PyTorch's own hooks are registered unchanged. If the optimizer exchanges other data instead of gradients,
    the model is not wrapped in DDP.
    """

    @override
    def default_bucket_mb(self, layers: Sequence[Layer], optimizer: Optimizer, compressor: Compressor) -> float | None:
        """Return the default size of DDP's buckets in MiB; None if no gradients are sent.

        For a compressor that needs the whole model as one message it is the model's size, otherwise `bucket_size`.
        """
        if optimizer.keeps_gradients:
            return None
        return max(0.001, gradient_mb(layers)) if compressor.traits.one_bucket else bucket_size(layers)

    @override
    def obstacle_to_resizing(self) -> str:
        return ""

    @override
    def refusals(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> list[Refusal]:
        method, stepping = compressor.component_name, optimizer.component_name
        return [
            Refusal(
                isinstance(compressor, TorchHook) and config.trigger == "sync",
                f"{method} starts its own sends, which --trigger {config.trigger} would delay",
                [{"trigger": "async"}],
            ),
            Refusal(
                isinstance(compressor, TorchHook) and optimizer.keeps_gradients,
                f"{method} is PyTorch's own communication hook of gradients, and {stepping} exchanges something in "
                "their place",
                [{"compressor": "none"}, {"optimizer": "sgd"}],
            ),
            Refusal(
                isinstance(compressor, OwnHook) and optimizer.exchanges,
                f"{method} compares methods of sending gradients, and {stepping} sends something else as well",
                [{"compressor": "none"}, {"optimizer": "sgd"}],
            ),
            Refusal(
                config.accumulate > 1 and optimizer.watches_layers,
                f"{stepping} takes its factors from one batch's forward and backward, and --accumulate "
                f"{config.accumulate} makes one step from several batches",
                [{"accumulate": None}, {"optimizer": "sgd"}],
            ),
            Refusal(
                config.bucket_mb is not None and optimizer.keeps_gradients,
                f"--bucket-mb has no meaning with {stepping}, which sends no gradients",
                [{"bucket_mb": None}],
            ),
        ]

    @override
    def bind(self, setup: Setup) -> BoundStrategy:
        channel = setup.open_channel() if setup.optimizer.exchanges else None
        if channel is not None and setup.optimizer.keeps_gradients:
            return OwnGradients(
                setup.model,
                channel,
                cast(BoundOptimizer, setup.optimizer.bind(setup.model, setup.config.lr, channel)),
                trigger=setup.config.trigger,
                nonfinite=setup.config.nonfinite,
            )
        return SharedGradients(setup, channel)


def is_plain(compressor: Compressor, collective: Collective, trigger: str) -> bool:
    """Return True if DDP without a communication hook does the same as these components with this trigger.

    Args:
        compressor: the run's compressor.
        collective: the run's collective.
        trigger: when buckets are sent: "async" (as soon as they are ready) or "sync" (after backward on all ranks).
    """
    return isinstance(compressor, NoCompression) and isinstance(collective, Native) and trigger == "async"


# Before torch 2.14 this option of DDP had another name.
_TAKEN = inspect.signature(DistributedDataParallel.__init__).parameters
NO_BROADCASTS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _TAKEN else "broadcast_buffers": False
}


def wrap(model: nn.Module, device: torch.device, bucket_mb: float) -> DistributedDataParallel:
    """Wrap the model in DDP with buckets of `bucket_mb` MiB, without broadcasts from rank 0.

    Broadcasts are not needed, because all ranks draw the initial weights from the same seed and compare hashes of them.
    """
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
        init_sync=False,
        **NO_BROADCASTS,
    )


# Steps between two readings of DDP's own timers: a reading costs as much as a small layer. 7 has no common factor with
# 5 or 10, so if an optimizer exchanges data every 5 or 10 steps, its exchanges are as frequent in timed steps as in
# other steps.
DDP_TIMER_EVERY = 7


class DdpExchange(Exchange):
    """Exchange of gradients by DDP itself, without a hook or with one of PyTorch's own hooks.

    Args:
        ddp: the wrapped model, without a communication hook so far.
        compressor: one of PyTorch's own hooks, which is registered here, or `none`.
        nonfinite: what to do about a non-finite gradient.
    """

    def __init__(self, ddp: DistributedDataParallel, compressor: Compressor, *, nonfinite: Nonfinite) -> None:
        self._ddp = ddp
        self._layers = layers_of(ddp.module)
        self._ddp._set_ddp_runtime_logging_sample_rate(1)
        self._torch_hook = compressor if isinstance(compressor, TorchHook) else None
        self._torch_state: object = None
        if self._torch_hook is not None:
            self._torch_state, torch_hook = self._torch_hook.hook(ddp.process_group)
            ddp.register_comm_hook(self._torch_state, torch_hook)
        self._gradient = Traffic(from_formula=True)
        self._guard = StepGuard(nonfinite)
        self._step_index = 0

    @property
    @override
    def traffic(self) -> Mapping[Purpose, Traffic]:
        # Computed by the formula of the ring all-reduce, because the backend does not count what it sends.
        return {"gradient": self._gradient, "control": Traffic(), "state": Traffic()}

    def start_step(self, step: Step) -> None:
        """Set the current step; call this method before backward."""
        self._step_index = step.index

    def finish_step(self) -> StepReport:
        """Check the reduced gradients for non-finite values, read DDP's timers, and return the step's report.

        The reduced gradients are equal on all ranks, so the ranks need no vote.
        """
        world_size, hook = dist.get_world_size(), self._torch_hook
        compressor = hook if hook is not None and self._step_index >= hook.traits.dense_steps else None
        encoded = []
        for layer in self._layers:
            nbytes = 4.0 * layer.numel if compressor is None else compressor.expected_nbytes(layer) or 0
            num_entries = layer.numel if compressor is None else int(nbytes) // compressor.value_nbytes
            encoded.append(
                EncodedLayer(layer=layer, payload="Dense", nbytes=nbytes, num_entries=num_entries, seconds=0.0)
            )
        self._gradient.nbytes += round(2 * (world_size - 1) / world_size * sum(part.nbytes for part in encoded))
        report = StepReport(skipped=self._is_skipped(), encoded=encoded)
        if self._step_index % DDP_TIMER_EVERY == DDP_TIMER_EVERY - 1 or profiler._is_profiler_enabled:
            cast(Any, self._ddp.logger).set_runtime_stats_and_log()  # else the timers are those of the previous step
            timers = self._ddp._get_ddp_logging_data()
            ended, computed = timers.get("backward_comm_time_end"), timers.get("backward_compute_time_end")
            report.exposed_s = max(0, int(ended) - int(computed)) * 1e-9 if ended and computed else None
        return report

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._torch_hook is None else self._torch_hook.state_of(self._torch_state)

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._torch_hook is not None:
            self._torch_hook.restore(self._torch_state, state)

    @override
    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    def _is_skipped(self) -> bool:
        gradients = [p.grad for p in self._ddp.parameters() if p.grad is not None]
        if are_finite(gradients):
            return False
        if self._torch_hook is not None:
            self._torch_hook.forget(self._torch_state)
        return self._guard.screen_(gradients)


class Replicas(BoundStrategy):
    """Trains a copy of the network on every rank: each rank's optimizer applies the same update.

    Args:
        model: the network, not wrapped in DDP.
        exchanges: the exchange of gradients, and the exchange of the optimizer's data.
        optimizer: updates the model's parameters.
        channel: sends and receives the data that the optimizer exchanges in `step`; None if it exchanges nothing.
    """

    exchanges: Sequence[CompressedCommunicator | DdpExchange]
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        model: nn.Module,
        exchanges: Sequence[CompressedCommunicator | DdpExchange],
        optimizer: torch.optim.Optimizer,
        channel: CompressedCommunicator | None,
    ) -> None:
        super().__init__(model, exchanges, optimizer)
        self._channel = channel

    @override
    def train_step(self, batch: Batch) -> StepReport:
        for group in self.optimizer.param_groups:
            group["lr"] = batch.lr
        for exchange in self.exchanges:
            exchange.start_step(batch.step)
        report = self._compute_gradients(batch)
        started = time.perf_counter()
        if not report.skipped:
            if batch.clip_norm is not None:  # by now gradients are equal on all ranks, or each rank clips its own
                nn.utils.clip_grad_norm_(self.model.parameters(), batch.clip_norm)
            self.optimizer.step()
            if self._channel is not None:
                own = self._channel.finish_step()
                report.add(own)
                report.update_exposed_s = own.exposed_s or 0.0
        self.optimizer.zero_grad()  # sets them to None, so that DDP copies the next gradients into buckets
        report.update_s = time.perf_counter() - started
        return report

    @abc.abstractmethod
    def _compute_gradients(self, batch: Batch) -> StepReport:
        """Run forward and backward, set each parameter's `grad` to what the optimizer needs, and return a report."""

    @override
    def synchronize(self) -> None:
        """Do nothing, because all copies of the network are equal after every step."""


class SharedGradients(Replicas):
    """Copies of the network whose gradients DDP exchanges in every backward: with this project's, PyTorch's or no hook.

    Args:
        setup: the run's components and this rank's model.
        channel: sends and receives the optimizer's data; None if the optimizer exchanges nothing.
    """

    def __init__(self, setup: Setup, channel: CompressedCommunicator | None) -> None:
        config, compressor, optimizer = setup.config, setup.compressor, setup.optimizer
        self.ddp = wrap(setup.model, setup.device, WHOLE_MODEL_MB if compressor.traits.one_bucket else config.bucket_mb)
        settings = HookSettings(
            seed=config.seed, trigger=config.trigger, nonfinite=config.nonfinite, timeout_s=config.timeout_s
        )
        gradients: CompressedCommunicator | DdpExchange
        if isinstance(compressor, TorchHook) or is_plain(compressor, setup.collective, config.trigger):
            gradients = DdpExchange(self.ddp, compressor, nonfinite=config.nonfinite)
        elif isinstance(compressor, OwnHook):
            gradients = compressor.make_hook(self.ddp, setup.collective, settings)
        else:
            reducer, optimizer = setup.make_reducer()
            gradients = CompressionHook(self.ddp, reducer, setup.collective, settings)
        exchanges = [gradients] if channel is None else [gradients, channel]
        super().__init__(setup.model, exchanges, optimizer.bind(setup.model, config.lr, channel), channel)
        self._setup = setup
        self._is_after_pause = True

    @override
    def _compute_gradients(self, batch: Batch) -> StepReport:
        gradients = self.exchanges[0]
        if self._is_after_pause and isinstance(gradients, CompressionHook):
            gradients.end_pause()
        self._is_after_pause = False
        batch.backward(self.ddp, self.ddp.no_sync)
        if reason := without_gradient(self.layers):
            raise RunFailed(reason)
        return gradients.finish_step()

    @override
    def synchronize(self) -> None:
        self._is_after_pause = True

    @override
    def state_dict(self) -> dict[str, Any]:
        self._is_after_pause = True
        return super().state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rebuild_buckets()
        super().load_state_dict(state)

    def _rebuild_buckets(self) -> None:
        """Run one forward and backward, so that DDP rebuilds its buckets as in the process that was stopped.

        The rounding of sums depends on the buckets. Afterwards `load_state_dict` replaces all state that this method
        changed.
        """
        config, device = self._setup.config, self._setup.device
        dataset: Dataset = spec.build("datasets", config.filled["dataset"])
        step = Step(index=0, epoch=0, rank=dist.get_rank(), world_size=dist.get_world_size(), seed=config.seed)
        self.exchanges[0].start_step(step)
        self._compute_gradients(
            Batch(
                x=dataset.dummy_batch(config.batch_size, device),
                y=dataset.dummy_targets(config.batch_size, device),
                step=step,
                lr=config.lr,
                task=dataset.task,
                amp=config.amp == "bf16",
            )
        )
        self.optimizer.zero_grad()


class OwnGradients(Replicas):
    """Copies of the network that each keep their own gradients, because the optimizer exchanges other data.

    About gradients, ranks only vote whether all are finite. With the sync trigger they also wait until all ranks have
    finished backward.

    Args:
        model: the network, not wrapped in DDP.
        channel: the optimizer's communicator, which also carries and counts the votes.
        optimizer: updates the model's parameters.
        trigger: with "sync", a rank continues when all ranks have finished backward; with "async", at once.
        nonfinite: what to do about a non-finite gradient.
    """

    optimizer: BoundOptimizer
    _channel: CompressedCommunicator

    def __init__(
        self,
        model: nn.Module,
        channel: CompressedCommunicator,
        optimizer: BoundOptimizer,
        *,
        trigger: Trigger,
        nonfinite: Nonfinite,
    ) -> None:
        super().__init__(model, [channel], optimizer, channel)
        self._trigger = trigger
        self._guard = StepGuard(nonfinite)
        self._is_after_pause = False

    @property
    @override
    def held_bytes(self) -> int | None:
        return (super().held_bytes or 0) + self.optimizer.residual_nbytes

    @override
    def synchronize(self) -> None:
        self.optimizer.show_shared()
        self._is_after_pause = True

    @override
    def go_to(self, step: int) -> None:
        self.optimizer.go_to(step)

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._is_after_pause = True

    @override
    def _compute_gradients(self, batch: Batch) -> StepReport:
        if self._is_after_pause:
            self.optimizer.show_own()
        self._is_after_pause = False
        batch.backward(self.model)
        started = time.perf_counter()
        if self._trigger == "sync":
            await_command(self._channel.transport)
        self._guard.screen_([parameter.grad for parameter in self.model.parameters() if parameter.grad is not None])
        skipped = self._guard.start_vote(self._channel.start_on_any_rank)()
        seconds = time.perf_counter() - started
        return StepReport(skipped=skipped, encode_s=0.0, exchange_s=seconds, exposed_s=seconds)
