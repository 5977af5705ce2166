"""DDP: every rank exchanges its gradients in every step, through PyTorch's DistributedDataParallel.

Source: Li et al., "PyTorch Distributed: Experiences on accelerating data parallel training" (VLDB 2020).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from bench.core.config.run import RunConfig
from bench.optimizers.base import Optimizer
from bench.strategies.base import BoundStrategy, Setup, Strategy
from bench.strategies.ddp.replicas import GradientExchange, KeptGradients, Replicas, wrap
from collectives.base import Collective, Key
from collectives.options import Incompatible
from collectives.payloads.base import Payload
from collectives.transport.base import Purpose, Traffic
from compressors.base import Compressor, OwnHook, TorchHook
from compressors.ddp.communicator import CompressedCommunicator, Nonfinite
from compressors.ddp.hook import CompressionHook, HookSettings
from compressors.ddp.report import EncodedLayer, StepReport
from compressors.layer import Layer, Step, layers_of

# Bucket size in MiB that exceeds any model: all layers go into one bucket.
WHOLE_MODEL_MB = 2.0**20


@dataclasses.dataclass(kw_only=True)
class Ddp(Strategy):
    """Register the compressor and the collective as DDP's communication hook.

    `none` with `native` and the async trigger is plain DDP without a hook of this project; PyTorch's own hooks are
    registered as they are. If the optimizer exchanges something instead of gradients, the model is not wrapped in DDP.
    """

    @override
    def default_bucket_mb(self, model_mb: float, optimizer: Optimizer, compressor: Compressor) -> float | None:
        """Return a quarter of the model, so that exchange overlaps backward, but 1 to 25 MiB: small buckets cost more.

        A compressor that needs the whole model as one message gets the model's size. None: no gradients are sent.
        """
        if optimizer.keeps_gradients:
            return None
        return max(0.001, model_mb) if compressor.one_bucket else min(25.0, max(1.0, model_mb / 4))

    @override
    def check_compatible(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> None:
        if isinstance(compressor, TorchHook) and config.trigger == "sync":
            raise Incompatible(f"{compressor.component_name} starts its own sends; leave --trigger at async")
        if isinstance(compressor, TorchHook) and optimizer.keeps_gradients:
            raise Incompatible(
                f"{compressor.component_name} is PyTorch's own communication hook of gradients, and "
                f"{optimizer.component_name} exchanges something in their place; use another compressor"
            )
        if isinstance(compressor, OwnHook) and optimizer.exchanges:
            raise Incompatible(
                f"{compressor.component_name} tries ways to send gradients, and {optimizer.component_name} sends "
                "something else as well; use another compressor or optimizer"
            )
        if config.accumulate > 1 and optimizer.watches_layers:
            raise Incompatible(
                f"{optimizer.component_name} takes its factors from one batch's forward and backward, and --accumulate "
                f"{config.accumulate} makes a step of several; leave one of them out"
            )
        if config.bucket_mb is not None and optimizer.keeps_gradients:
            raise Incompatible(
                f"--bucket-mb has no meaning with {optimizer.component_name}, which sends no gradients; leave it out"
            )

    @override
    def bind(self, setup: Setup) -> BoundStrategy:
        channel = setup.open_channel() if setup.optimizer.exchanges else None
        wrapped, gradients, optimizer = self._gradients(setup, channel)
        exchange = gradients if channel is None else WithOptimizer(gradients, channel)
        return Replicas(setup.model, wrapped, exchange, optimizer.bind(setup.model, setup.config.lr, channel), channel)

    def _gradients(
        self, setup: Setup, channel: CompressedCommunicator | None
    ) -> tuple[nn.Module, GradientExchange, Optimizer]:
        """Return the wrapped model, the exchange of its gradients, and the optimizer (perhaps without momentum)."""
        config, compressor = setup.config, setup.compressor
        if channel is not None and setup.optimizer.keeps_gradients:
            kept = KeptGradients(setup.model, channel, trigger=config.trigger, nonfinite=config.nonfinite)
            return setup.model, kept, setup.optimizer
        ddp = wrap(setup.model, setup.device, WHOLE_MODEL_MB if compressor.one_bucket else config.bucket_mb)
        if isinstance(compressor, TorchHook) or is_plain(compressor, setup.collective, config.trigger):
            return ddp, DdpExchange(ddp, compressor, nonfinite=config.nonfinite), setup.optimizer
        settings = HookSettings(
            seed=config.seed, trigger=config.trigger, nonfinite=config.nonfinite, timeout_s=config.timeout_s
        )
        if isinstance(compressor, OwnHook):
            return ddp, compressor.make_hook(ddp, setup.collective, settings), setup.optimizer
        reducer, optimizer = setup.make_reducer()
        return ddp, CompressionHook(ddp, reducer, setup.collective, settings), optimizer


def is_plain(compressor: Compressor, collective: Collective, trigger: str) -> bool:
    """Return True if DDP without a hook does the same."""
    return (compressor.component_name, collective.component_name, trigger) == ("none", "native", "async")


# Steps between two readings of DDP's own timers: a reading costs as much as a small layer. 7 has no common factor with
# 5 or 10, so an optimizer that exchanges something every 5 or 10 steps does so as often in timed steps as in others.
DDP_TIMER_EVERY = 7


class DdpExchange:
    """Let DDP exchange gradients, by itself or with one of PyTorch's own hooks.

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
        self._nonfinite = nonfinite
        self._step_index = 0

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Return gradient bytes by the ring all-reduce formula, because the backend does not count what it sends."""
        return {"gradient": self._gradient, "control": Traffic(), "state": Traffic()}

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """Return nothing: DDP's payloads are not accessible."""
        return {}

    def residual_norms(self) -> dict[int, float]:
        """Return nothing: DDP keeps no residuals."""
        return {}

    def start_step(self, step: Step) -> None:
        """Set the current step; call before `backward`."""
        self._step_index = step.index

    def finish_step(self) -> StepReport:
        """Check the reduced gradient for non-finite values and read DDP's timers.

        The gradient is equal on all ranks, so they need no vote.
        """
        world_size = dist.get_world_size()
        encoded = [self._encoded(layer) for layer in self._layers]
        self._gradient.nbytes += round(2 * (world_size - 1) / world_size * sum(part.nbytes for part in encoded))
        return StepReport(skipped=self._is_skipped(), exposed_s=self._exposed_s(), encoded=encoded)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of PyTorch's hook; DDP itself has none."""
        return {} if self._torch_hook is None else self._torch_hook.state_of(self._torch_state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self._torch_hook is not None:
            self._torch_hook.restore(self._torch_state, state)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _encoded(self, layer: Layer) -> EncodedLayer:
        nbytes: float = 4 * layer.numel
        num_entries = layer.numel
        if self._torch_hook is not None and not self._torch_hook.is_dense_at(self._step_index):
            nbytes = self._torch_hook.expected_nbytes(layer) or 0
            num_entries = self._torch_hook.num_entries(layer)
        return EncodedLayer(layer=layer, payload="Dense", nbytes=nbytes, num_entries=num_entries, seconds=0.0)

    def _is_skipped(self) -> bool:
        gradients = [p.grad for p in self._ddp.parameters() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        if bool(torch.isfinite(norms).all()):
            return False
        if self._torch_hook is not None:
            self._torch_hook.forget(self._torch_state)
        if self._nonfinite == "zero":
            for gradient in gradients:
                torch.nan_to_num_(gradient, nan=0.0, posinf=0.0, neginf=0.0)
            return False
        return True

    def _exposed_s(self) -> float | None:
        if self._step_index % DDP_TIMER_EVERY != DDP_TIMER_EVERY - 1:
            return None
        assert self._ddp.logger is not None
        self._ddp.logger.set_runtime_stats_and_log()  # otherwise the timers are those of the previous step
        timers = self._ddp._get_ddp_logging_data()
        ended, computed = timers.get("backward_comm_time_end"), timers.get("backward_compute_time_end")
        if not ended or not computed:
            return None
        return max(0, int(ended) - int(computed)) * 1e-9


class WithOptimizer:
    """Combine the exchange of gradients with the optimizer's own exchange.

    `finish_step` ends only the exchange of gradients, because the optimizer sends later, in its `step`.

    Args:
        gradients: the exchange of gradients.
        channel: carries what the optimizer exchanges.
    """

    def __init__(self, gradients: GradientExchange, channel: CompressedCommunicator) -> None:
        self._gradients = gradients
        self._channel = channel

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Return the sum of both exchanges' traffic, per purpose."""
        both = (self._gradients.traffic, self._channel.traffic)
        return {p: sum((traffic.get(p, Traffic()) for traffic in both), Traffic()) for p in get_args(Purpose)}

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """Return what this rank encoded in its last step; if both encoded a layer, its gradient's payload."""
        return {**self._channel.last_encoded, **self._gradients.last_encoded}

    def residual_norms(self) -> dict[int, float]:
        """Return the L2 norm of each layer's residual, by layer id; if both have one, the gradient's."""
        return self._channel.residual_norms() | self._gradients.residual_norms()

    def start_step(self, step: Step) -> None:
        """Set the current step of both; call before `backward`."""
        self._gradients.start_step(step)
        self._channel.start_step(step)

    def finish_step(self) -> StepReport:
        """End the exchange of gradients and report it."""
        return self._gradients.finish_step()

    def state_dict(self) -> dict[str, Any]:
        """Return what both keep from step to step."""
        return {"gradients": self._gradients.state_dict(), "optimizer": self._channel.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._gradients.load_state_dict(state["gradients"])
        self._channel.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Close both exchanges; every rank must call."""
        self._gradients.close()
        self._channel.close()
