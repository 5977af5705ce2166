"""DDP: every rank exchanges its gradients in every step, through PyTorch's DistributedDataParallel.

Source: Li et al., "PyTorch Distributed: Experiences on accelerating data parallel training" (VLDB 2020).
"""

from __future__ import annotations

import dataclasses

from torch import nn
from typing_extensions import override

from bench.core.config.run import RunConfig
from bench.optimizers.base import Optimizer
from bench.strategies.base import BoundStrategy, Setup, Strategy
from bench.strategies.data_parallel.ddp_exchange import DdpExchange
from bench.strategies.data_parallel.kept_gradients import KeptGradients
from bench.strategies.data_parallel.replicas import GradientExchange, Replicas, wrap
from bench.strategies.data_parallel.with_optimizer import WithOptimizer
from collectives.base import Collective
from compressors.base import Compressor
from compressors.ddp.attaching import hook_for
from compressors.ddp.channel import Channel
from compressors.ddp.hook import HookSettings

# A bucket that no model fills: one bucket for all layers.
WHOLE_MODEL_MB = 2.0**20


@dataclasses.dataclass(kw_only=True)
class Ddp(Strategy):
    """Compressor and collective together are DDP's communication hook.

    `none` on `native` with the async trigger is DDP itself, with no hook of ours; so are PyTorch's own hooks. For
    an optimizer that exchanges something in the gradients' place there is no DDP: the network stays bare.
    """

    @override
    def default_bucket_mb(self, model_mb: float, optimizer: Optimizer, compressor: Compressor) -> float | None:
        """Four, so that the first ones travel while backward goes on; below 1 MiB they cost more than they hide."""
        if optimizer.keeps_gradients:
            return None
        return max(0.001, model_mb) if compressor.one_bucket else min(25.0, max(1.0, model_mb / 4))

    @override
    def refusal(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> str | None:
        if compressor.engine_hook and config.trigger == "sync":
            return f"{compressor.component_name} starts its own sends; leave --trigger at async"
        if compressor.engine_hook and optimizer.keeps_gradients:
            return (
                f"{compressor.component_name} is PyTorch's own communication hook of gradients, and "
                f"{optimizer.component_name} exchanges something in their place; use another compressor"
            )
        if compressor.chooses and optimizer.exchanges:
            return (
                f"{compressor.component_name} tries ways to send gradients, and {optimizer.component_name} sends "
                "something else as well; use another compressor or optimizer"
            )
        if config.accumulate > 1 and optimizer.watches_layers:
            return (
                f"{optimizer.component_name} takes its factors from one batch's forward and backward, and --accumulate "
                f"{config.accumulate} makes a step of several; leave one of them out"
            )
        if config.bucket_mb is not None and optimizer.keeps_gradients:
            return f"--bucket-mb has no meaning with {optimizer.component_name}, which sends no gradients; leave it out"
        return None

    @override
    def bind(self, setup: Setup) -> BoundStrategy:
        channel = setup.open_channel() if setup.optimizer.exchanges else None
        wrapped, gradients, optimizer = self._gradients(setup, channel)
        exchange = gradients if channel is None else WithOptimizer(gradients, channel)
        return Replicas(setup.model, wrapped, exchange, optimizer.bind(setup.model, setup.config.lr, channel), channel)

    def _gradients(self, setup: Setup, channel: Channel | None) -> tuple[nn.Module, GradientExchange, Optimizer]:
        """(the model as it is called, what becomes of its gradients, the optimizer that is left)."""
        config, compressor = setup.config, setup.compressor
        if channel is not None and setup.optimizer.keeps_gradients:
            kept = KeptGradients(setup.model, channel, trigger=config.trigger, nonfinite=config.nonfinite)
            return setup.model, kept, setup.optimizer
        reducer, optimizer = setup.make_reducer()
        ddp = wrap(setup.model, setup.device, WHOLE_MODEL_MB if compressor.one_bucket else config.bucket_mb)
        if compressor.engine_hook or is_plain(compressor, setup.collective, config.trigger):
            return ddp, DdpExchange(ddp, compressor, nonfinite=config.nonfinite), optimizer
        settings = HookSettings(
            seed=config.seed, trigger=config.trigger, nonfinite=config.nonfinite, timeout_s=config.timeout_s
        )
        return ddp, hook_for(ddp, reducer, setup.collective, settings), optimizer


def is_plain(compressor: Compressor, collective: Collective, trigger: str) -> bool:
    """Whether the pair is what DDP does by itself."""
    return (compressor.component_name, collective.component_name, trigger) == ("none", "native", "async")
