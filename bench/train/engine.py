"""The engine: what turns local gradients into new parameters. DDP, with or without our exchange as its hook.

The asynchronous server is an engine too and has a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.core.config import RunConfig
from bench.optimizers.base import Optimizer
from bench.train.async_server import AsynchronousServer
from collectives.base import Collective
from collectives.payloads.base import Payload
from collectives.server import Server
from collectives.transport.base import Purpose, Traffic
from compressors.base import Compressor
from compressors.ddp.communication_thread import Outcome
from compressors.ddp.hook import CompressionHook
from compressors.families.torch_comm_hook import TorchCommHook
from compressors.layer import Layer, Sent, Step, layers_of
from compressors.state import Key

# DDP's own runtime timers are read once in so many steps: a reading costs as much as a small layer.
DDP_TIMER_EVERY = 10
# A bucket that no model fills: one bucket for all layers.
WHOLE_MODEL_MB = 2.0**20


class Engine(Protocol):
    """Turns local gradients into new parameters.

    Attributes:
        model: the bare network, whose parameters are trained.
        layers: the network's trainable parameters.
    """

    model: nn.Module
    layers: list[Layer]

    @property
    def ddp(self) -> nn.Module:
        """What the loop calls: DDP around the network, or the network itself."""

    def start_step(self, step: Step, lr: float) -> None:
        """Call before the forward pass, with the learning rate of this step's update."""

    def finish_step(self) -> Outcome:
        """Call after `backward`: whether a gradient was not finite, and what the exchange did."""

    def update(self, outcome: Outcome) -> int:
        """Give the parameters their next values (unless the step is skipped) and clear the gradients.

        Returns:
            Optimizer steps done so far, in which `world_size` batches count as one, whoever of the ranks made them.
        """

    def settle(self) -> None:
        """Wait until what all ranks did is applied everywhere; ranks then hold equal parameters. Every rank calls."""

    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Bytes and messages sent by this rank since the start, per purpose."""

    def residual_norms(self) -> dict[int, float]:
        """L2 norm of the residual by layer id."""

    def last_encoded(self) -> Mapping[Key, Payload]:
        """What this rank encoded in its last step, by the ids of the layers in it."""

    def close(self) -> None:
        """Release threads and memory; every rank must call."""


def build_engine(
    config: RunConfig,
    model: nn.Module,
    compressor: Compressor,
    collective: Collective,
    optimizer: Optimizer,
    device: torch.device,
) -> Engine:
    """The engine for these components; every rank must call.

    `none` on `native` with the async trigger is DDP itself, with no hook of ours; so are PyTorch's own hooks.
    """
    if isinstance(collective, Server) and collective.holds_parameters:
        return AsynchronousServer(config, model, compressor, collective, optimizer)
    if compressor.engine_hook or is_plain_ddp(compressor, collective, config.trigger):
        return PlainDDP(config, model, compressor, optimizer, device)
    return HookedDDP(config, model, compressor, collective, optimizer, device)


def is_plain_ddp(compressor: Compressor, collective: Collective, trigger: str) -> bool:
    """Whether the pair is what DDP does by itself."""
    return (compressor.component_name, collective.component_name, trigger) == ("none", "native", "async")


def wrap(model: nn.Module, device: torch.device, bucket_mb: float) -> DistributedDataParallel:
    """DDP around the model. Ranks start from one seed, so nothing is broadcast; a hash of the weights is compared."""
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        init_sync=False,
    )


class Replicas:
    """What both kinds of DDP share: every rank applies the same update to its own replica of the model."""

    def __init__(self, config: RunConfig, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.layers = layers_of(model)
        self.optimizer = optimizer.build(model.parameters(), config.lr)
        self._num_steps = 0

    def update(self, outcome: Outcome) -> int:
        """One optimizer step. Without old gradients, DDP copies the next ones into its buckets instead of adding."""
        if not outcome.skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._num_steps += 1
        return self._num_steps

    def settle(self) -> None:
        """Replicas are equal after every step."""

    def _set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr


class PlainDDP(Replicas):
    """DDP with the backend's all-reduce, by itself or under one of PyTorch's own hooks.

    What it sends follows from a formula, since the backend hides the wire.
    """

    def __init__(
        self, config: RunConfig, model: nn.Module, compressor: Compressor, optimizer: Optimizer, device: torch.device
    ) -> None:
        super().__init__(config, model, optimizer)
        self.ddp = wrap(model, device, config.bucket_mb)
        self.ddp._set_ddp_runtime_logging_sample_rate(1)
        self._engine_hook = compressor if isinstance(compressor, TorchCommHook) else None
        if self._engine_hook is not None:
            self.ddp.register_comm_hook(*self._engine_hook.hook(self.ddp.process_group))
        self._gradient = Traffic(from_formula=True)
        self._nonfinite = config.nonfinite
        self._step_index = 0

    def start_step(self, step: Step, lr: float) -> None:
        """Nothing to prepare but the learning rate."""
        self._set_learning_rate(lr)
        self._step_index = step.index

    def finish_step(self) -> Outcome:
        """Screen the reduced gradient (equal on all ranks, so no vote is needed) and read DDP's timers."""
        world_size = dist.get_world_size()
        sent = [self._sent(layer) for layer in self.layers]
        self._gradient.nbytes += round(2 * (world_size - 1) / world_size * sum(part.nbytes for part in sent))
        return Outcome(skipped=self._screen(), exposed_s=self._exposed_s(), sent=sent)

    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Gradient bytes by the ring all-reduce's formula."""
        return {"gradient": self._gradient, "control": Traffic()}

    def _sent(self, layer: Layer) -> Sent:
        nbytes: float = 4 * layer.numel
        if self._engine_hook is not None and not self._engine_hook.is_dense_at(self._step_index):
            nbytes = self._engine_hook.expected_nbytes(layer) or 0
        return Sent(layer=layer, payload="Dense", nbytes=nbytes, num_entries=layer.numel, seconds=0.0)

    def residual_norms(self) -> dict[int, float]:
        """DDP keeps none."""
        return {}

    def last_encoded(self) -> Mapping[Key, Payload]:
        """Nothing of ours."""
        return {}

    def close(self) -> None:
        """DDP holds nothing that outlives it."""

    def _screen(self) -> bool:
        gradients = [p.grad for p in self.ddp.parameters() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        if bool(torch.isfinite(norms).all()):
            return False
        if self._nonfinite == "zero":
            for gradient in gradients:
                torch.nan_to_num_(gradient, nan=0.0, posinf=0.0, neginf=0.0)
            return False
        return True

    def _exposed_s(self) -> float | None:
        if self._step_index % DDP_TIMER_EVERY != DDP_TIMER_EVERY - 1:
            return None
        timers = self.ddp._get_ddp_logging_data()  # of the step before this one
        ended, computed = timers.get("backward_comm_time_end"), timers.get("backward_compute_time_end")
        if not ended or not computed:
            return None
        return max(0, int(ended) - int(computed)) * 1e-9


class HookedDDP(Replicas):
    """DDP with the exchange as its communication hook, on a process group of its own."""

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        compressor: Compressor,
        collective: Collective,
        optimizer: Optimizer,
        device: torch.device,
    ) -> None:
        super().__init__(config, model, optimizer)
        self.ddp = wrap(model, device, WHOLE_MODEL_MB if compressor.one_bucket else config.bucket_mb)
        self.attached = CompressionHook(
            self.ddp,
            compressor,
            collective,
            seed=config.seed,
            trigger=config.trigger,
            nonfinite=config.nonfinite,
            timeout_s=config.timeout_s,
        )

    def start_step(self, step: Step, lr: float) -> None:
        """Tell the exchange where training is."""
        self._set_learning_rate(lr)
        self.attached.start_step(step)

    def finish_step(self) -> Outcome:
        """What the exchange did; re-raises what failed in its thread."""
        return self.attached.finish_step()

    def traffic(self) -> Mapping[Purpose, Traffic]:
        """As the transport counted."""
        return self.attached.traffic

    def residual_norms(self) -> dict[int, float]:
        """As the compressor keeps them."""
        return self.attached.residual_norms()

    def last_encoded(self) -> Mapping[Key, Payload]:
        """As the compressor keeps it."""
        return self.attached.exchange.compressor.last_encoded

    def close(self) -> None:
        """Stop the thread and let the collective release what it holds."""
        self.attached.close()
