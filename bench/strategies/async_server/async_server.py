"""Async server: workers push gradients to a server that updates the parameters, and do not wait for each other.

One rank is also the server: it holds the parameters and the optimizer. With `mode=ssp` no rank gets more than
`staleness` steps ahead of another; 0 is synchronous training, bit for bit. With `mode=asp` every push is applied on
arrival, and any `world_size` batches count as one step of the run, whichever ranks processed them. The run, and every
interval between two evaluations, ends when the ranks together have processed as many batches as synchronous ranks
would. A slow rank processes fewer batches of its own shard and no other rank waits for it; learning rate and epoch
follow the step count that a rank last received from the server.

Source: Dean et al., "Large scale distributed deep networks" (NIPS 2012); Ho et al., "More effective distributed ML via
a stale synchronous parallel parameter server" (NIPS 2013).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from typing_extensions import Doc, override

from bench.core.config.run import RunConfig
from bench.optimizers.base import Optimizer
from bench.strategies.async_server.training import AsyncTraining
from bench.strategies.base import BoundStrategy, Setup, Strategy, refuse
from collectives.base import Collective
from collectives.options import CountOrZero, OptionError
from collectives.parameter_server.server import BoundedStaleness, OnArrival, Parameters, ParameterServer
from compressors.base import Compressor, TorchHook
from compressors.ddp.hook import OwnHook


@dataclasses.dataclass(kw_only=True)
class AsyncServer(Strategy):
    """Train on a parameter server.

    Bytes: a worker pushes one packed payload per layer; the server answers each step with all parameters in fp32.

    Raises:
        OptionError: `staleness` is set with mode=asp, which has no bound.
    """

    mode: Annotated[
        Literal["ssp", "asp"],
        Doc("ssp: parameters at most `staleness` steps old; asp: each push applied on arrival"),
    ] = "ssp"
    staleness: Annotated[CountOrZero, Doc("steps by which parameters may lag behind with mode=ssp")] = 0
    root: Annotated[CountOrZero, Doc("the rank that is also the server")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.staleness and self.mode != "ssp":
            raise OptionError(
                f"{self.component_name}: staleness={self.staleness} bounds mode=ssp; leave it out of mode={self.mode}"
            )

    @override
    def default_collectives(self, compressor: Compressor) -> tuple[str, ...]:
        return ("server",)

    @override
    def check_compatible(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> None:
        name, method = self.component_name, compressor.component_name
        is_server = collective.component_name == "server" and not collective.option_texts(only_changed=True)
        refuse(
            (
                not is_server,
                f"{name} pushes to a server of its own and sums nothing; leave out --collective {config.collective}",
            ),
            (
                self.root >= config.world_size,
                f"{name}: root={self.root} is none of the {config.world_size} ranks, which count from 0; lower it",
            ),
            (config.device == "cuda", f"{name} works over gloo between CPUs only; add --device cpu"),
            (
                config.trigger != "async",
                f"--trigger {config.trigger} waits for all ranks, which {name} never does; leave it out",
            ),
            (
                config.bucket_mb is not None,
                f"--bucket-mb has no meaning with {name}, which sends every layer by itself; leave it out",
            ),
            (
                config.accumulate > 1,
                f"{name} pushes every gradient as soon as it is there; leave out --accumulate, or use --strategy ddp",
            ),
            (
                isinstance(compressor, TorchHook),
                f"{method} is PyTorch's own communication hook, which works inside DDP; use --strategy ddp",
            ),
            (
                isinstance(compressor, OwnHook),
                f"{method} tries compressors and collectives inside DDP; use --strategy ddp or another compressor",
            ),
            (
                compressor.needs_all_ranks,
                f"{method} has ranks agree with each other before they send, which {name} does not let them wait for; "
                "use --strategy ddp or another compressor",
            ),
            (
                compressor.one_bucket,
                f"{method} wants the whole model as one message under these options, and {name} sends every layer by "
                "itself; use --strategy ddp or other options",
            ),
            (
                optimizer.exchanges,
                f"{optimizer.component_name} exchanges something between all ranks in every step, and with {name} only "
                "the server steps; use --strategy ddp",
            ),
        )

    @override
    def bind(self, setup: Setup) -> BoundStrategy:
        return AsyncTraining(setup, root=self.root, make_server=self.server)

    def server(self, parameters: Parameters, world_size: int, timeout_s: float) -> ParameterServer:
        """Return the server for this mode; only rank `root` calls."""
        if self.mode == "asp":
            return OnArrival(parameters, world_size, timeout_s)
        return BoundedStaleness(parameters, world_size, timeout_s, staleness=self.staleness)
