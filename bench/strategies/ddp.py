"""DDP: every rank exchanges its gradients in every step, through PyTorch's DistributedDataParallel.

Source: Li et al., "PyTorch Distributed: Experiences on accelerating data parallel training" (VLDB 2020).
"""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from bench.core.config import RunConfig
from bench.strategies.base import BoundStrategy, Setup, Strategy
from bench.strategies.data_parallel.ddp_exchange import DdpExchange
from bench.strategies.data_parallel.replicas import GradientExchange, Replicas, wrap
from collectives.base import Collective
from compressors.base import Compressor
from compressors.ddp.hook import CompressionHook

# A bucket that no model fills: one bucket for all layers.
WHOLE_MODEL_MB = 2.0**20


@dataclasses.dataclass(kw_only=True)
class Ddp(Strategy):
    """Compressor and collective together are DDP's communication hook.

    `none` on `native` with the async trigger is DDP itself, with no hook of ours; so are PyTorch's own hooks.
    """

    @override
    def default_bucket_mb(self, model_mb: float) -> float:
        """Four, so that the first ones travel while backward goes on; below 1 MiB they cost more than they hide."""
        return min(25.0, max(1.0, model_mb / 4))

    @override
    def refusal(self, config: RunConfig, compressor: Compressor, collective: Collective) -> str | None:
        if compressor.engine_hook and config.trigger == "sync":
            return f"{compressor.component_name} starts its own sends; leave --trigger at async"
        return None

    @override
    def bind(self, setup: Setup) -> BoundStrategy:
        config, compressor = setup.config, setup.compressor
        reducer, optimizer = setup.make_reducer()
        ddp = wrap(setup.model, setup.device, WHOLE_MODEL_MB if compressor.one_bucket else config.bucket_mb)
        exchange: GradientExchange
        if compressor.engine_hook or is_plain(compressor, setup.collective, config.trigger):
            exchange = DdpExchange(ddp, compressor, nonfinite=config.nonfinite)
        else:
            exchange = CompressionHook(
                ddp,
                reducer,
                setup.collective,
                seed=config.seed,
                trigger=config.trigger,
                nonfinite=config.nonfinite,
                timeout_s=config.timeout_s,
            )
        return Replicas(setup.model, ddp, exchange, optimizer.build(setup.model.parameters(), config.lr))


def is_plain(compressor: Compressor, collective: Collective, trigger: str) -> bool:
    """Whether the pair is what DDP does by itself."""
    return (compressor.component_name, collective.component_name, trigger) == ("none", "native", "async")
