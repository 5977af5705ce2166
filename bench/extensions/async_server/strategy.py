"""Async server: workers push gradients to a server that updates the parameters, and do not wait for each other.

One rank is also the server: it holds the parameters and the optimizer. With `mode=ssp` no rank gets more than
`staleness` steps ahead of another; staleness 0 gives the result of synchronous training, bit for bit. With `mode=asp`
every push is applied on arrival, and any `world_size` batches count as one step of the run, whichever ranks processed
them. The run, and every interval between two evaluations, ends when the ranks together have processed as many batches
as synchronous ranks would. A slow rank processes fewer batches of its own shard (part of the data), and no other rank
waits for it. Learning rate and epoch of a rank follow the number of steps that the rank last received from the server.

Source: Dean et al., "Large scale distributed deep networks" (NIPS 2012); Ho et al., "More effective distributed ML via
a stale synchronous parallel parameter server" (NIPS 2013).
"""

import copy
import dataclasses
import datetime
import threading
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Doc, override

from bench.core.config.run import RunConfig
from bench.extensions.async_server.server import (
    Parameters,
    ParameterServer,
    Push,
    RemoteServer,
    ServerReply,
    Session,
    serve,
)
from bench.extensions.async_server.worker import AsyncWorker
from bench.optimizers.base import Optimizer
from bench.strategies.base import Batch, BoundStrategy, Setup, Strategy
from collectives.base import Collective
from collectives.options import CountOrZero, OptionError
from collectives.payloads import Dense, unpack
from collectives.refusals import Refusal
from collectives.server import Server, added
from collectives.transport.base import Transport
from collectives.transport.process_group import ProcessGroupTransport
from compressors.base import Compressor, DdpHook, PerLayer
from compressors.layer import Layer, Step, layers_of
from gradwire.exchange.reducer import PerLayerReducer
from gradwire.exchange.report import Bucket, StepReport
from gradwire.step_guard import StepGuard


@dataclasses.dataclass(kw_only=True)
class AsyncServer(Strategy, name="async_server"):
    """Train with a parameter server: workers push gradients, and the server sends back parameters.

    Bytes: a worker pushes one packed payload per layer; the server answers each step with all parameters in fp32.

    Raises:
        OptionError: `staleness` is set with mode=asp, which does not bound the staleness.
    """

    default_collectives: ClassVar[tuple[str, ...]] = ("server",)

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
                f"{self.component_name}: staleness={self.staleness} has a meaning only with mode=ssp; leave it out"
            )

    @override
    def refusals(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> list[Refusal]:
        name, method, stepping = self.component_name, compressor.component_name, optimizer.component_name
        other_method: list[dict[str, Any]] = [{"strategy": "ddp"}, {"compressor": "none"}]
        return [
            Refusal(
                collective != Server(),
                f"{name} pushes to a server of its own and sums nothing, and --collective is {config.collective}",
                [{"collective": None}],
            ),
            Refusal(
                self.root >= config.world_size,
                f"{name}: root={self.root} is none of the {config.world_size} ranks, which count from 0",
                [{"strategy.root": 0}],
            ),
            Refusal(
                config.device == "cuda", f"{name} works over gloo between CPUs only, not on cuda", [{"device": "cpu"}]
            ),
            Refusal(
                config.trigger != "async",
                f"--trigger {config.trigger} waits for all ranks, which {name} never does",
                [{"trigger": None}],
            ),
            Refusal(
                config.bucket_mb is not None,
                f"--bucket-mb has no meaning with {name}, which sends every layer by itself",
                [{"bucket_mb": None}],
            ),
            Refusal(
                config.accumulate > 1,
                f"{name} pushes every gradient as soon as it is computed, and --accumulate {config.accumulate} adds "
                "several up",
                [{"accumulate": None}, {"strategy": "ddp"}],
            ),
            Refusal(
                isinstance(compressor, DdpHook),
                f"{method} works through DDP's communication hook, which {name} does not have",
                other_method,
            ),
            Refusal(
                compressor.traits.needs_all_ranks,
                f"{method} has ranks agree with each other before they send, and with {name} ranks do not wait for "
                "each other",
                other_method,
            ),
            Refusal(
                compressor.traits.one_bucket,
                f"{method} wants the whole model as one message with these options, and {name} sends every layer by "
                "itself",
                other_method,
            ),
            Refusal(
                optimizer.exchanges,
                f"{stepping} sends data of its own between all ranks, and with {name} only the server runs the "
                "optimizer",
                [{"strategy": "ddp"}, {"optimizer": "sgd"}],
            ),
            Refusal(
                optimizer.needs_network,
                f"{stepping} needs the whole network, and the server of {name} has only its parameters",
                [{"strategy": "ddp"}, {"optimizer": "sgd"}],
            ),
        ]

    @override
    def bind(self, setup: Setup) -> BoundStrategy:
        return AsyncTraining(setup, self)

    def server(self, parameters: Parameters, world_size: int, timeout_s: float) -> ParameterServer:
        """Create the parameter server for this mode; only rank `root` may call this method.

        Args:
            parameters: the parameters that the server updates.
            world_size: number of workers.
            timeout_s: longest wait of a worker for other workers, in seconds.
        """
        staleness = None if self.mode == "asp" else self.staleness
        return ParameterServer(parameters, world_size, timeout_s, staleness=staleness)


class ServerParameters:
    """Hold the server's fp32 copies of a model's trainable parameters and update them; implements `Parameters`.

    Args:
        layers: the model's layers, whose weights are copied; their ids count from 0.
        compressor: the run's compressor, which turns a sum of payloads back into a gradient.
        optimizer: the run's optimizer, which updates the copies.
        lr: the learning rate before any schedule.
        world_size: number of workers.
        seed: the run's seed.
        clip_norm: largest L2 norm of an update's gradient; None: no limit.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        compressor: Compressor,
        optimizer: Optimizer,
        *,
        lr: float,
        world_size: int,
        seed: int,
        clip_norm: float | None = None,
    ) -> None:
        self._weights = [
            nn.Parameter(cast(torch.Tensor, layer.weight).detach().float().contiguous().clone()) for layer in layers
        ]
        self._layers = [
            dataclasses.replace(layer, weight=weight) for layer, weight in zip(layers, self._weights, strict=True)
        ]
        self._gradients = [torch.zeros_like(weight) for weight in self._weights]
        self._reducer = PerLayerReducer(cast(PerLayer, compressor))
        self._optimizer = optimizer.bind(nn.ParameterList(self._weights), lr)
        self._world_size = world_size
        self._seed = seed
        self._clip_norm = clip_norm

    def apply(self, pushes: Sequence[Push], num_terms: int) -> None:
        """Make one optimizer step with the sum of the pushed gradients / `num_terms`.

        A layer that is in no push keeps its weights.

        Args:
            pushes: the gradients that workers sent, in rank order; the step uses the learning rate of the first push,
                times num_terms / world_size.
            num_terms: number of workers' gradients that one update averages.
        """
        first = pushes[0]
        end = first.clock_end
        step = Step(index=end.index, epoch=end.epoch, rank=first.rank, world_size=num_terms, seed=self._seed)
        for layer, weight, gradient in zip(self._layers, self._weights, self._gradients, strict=True):
            terms = [push.payloads[layer.id] for push in pushes if layer.id in push.payloads]
            weight.grad = gradient if terms else None  # a layer without a push keeps its weights
            if terms:
                total = terms[0] if len(terms) == 1 else added(terms)
                self._reducer.finish_bucket(total, Bucket(layers=[layer], gradients=[gradient.view(-1)], step=step))
        for group in self._optimizer.param_groups:
            group["lr"] = end.lr * (num_terms / self._world_size)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._weights, self._clip_norm)
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return a deep copy of the parameters and of the optimizer's state."""
        return copy.deepcopy({"weights": self._weights, "optimizer": self._optimizer.state_dict()})

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        for weight, saved in zip(self._weights, state["weights"], strict=True):
            weight.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])

    def packed(self) -> list[torch.Tensor]:
        """Return each layer's weights in fp32, packed into bytes as the server sends them."""
        return [Dense(weight.detach().view(-1)).pack() for weight in self._weights]


def star(root: int, timeout_s: float) -> dict[int, Transport]:
    """Connect `root` with every other rank, and return this rank's connections; every rank must call this function.

    The result maps ranks to connections. On `root` it has one entry for every other rank. On another rank it has a
    single entry: this rank's own number, with its connection to `root`. Each connection is a separate process group, in
    which `root` is rank 0, because threads must not share a process group.

    Args:
        root: the rank that is also the server.
        timeout_s: longest wait for a message, in seconds.
    """
    links: dict[int, Transport] = {}
    for worker in range(dist.get_world_size()):
        if worker != root:
            group = dist.new_group([root, worker], timeout=datetime.timedelta(seconds=timeout_s), sort_ranks=False)
            if dist.get_rank() in (root, worker):
                links[worker] = ProcessGroupTransport(cast(dist.ProcessGroup, group), timeout_s=timeout_s)
    return links


def serve_worker(server: ParameterServer, session: Session, link: Transport, numels: Sequence[int]) -> None:
    """Answer the worker at the other end of `link` until it disconnects; raise any error in every worker."""
    try:
        serve(link, session, numels)
    except Exception as error:  # noqa: BLE001 - re-raised in every worker, including this process's own
        server.fail(error)


WORKER_TIMEOUT_FACTOR = 1.2  # workers wait longer than the server, whose error names the late rank


class AsyncTraining(BoundStrategy):
    """Run this rank's worker and, on the rank `root`, also the server with its threads.

    Args:
        setup: the run's components and this rank's model; only the server uses the optimizer.
        options: the strategy with its options; it creates the server.
    """

    def __init__(self, setup: Setup, options: AsyncServer) -> None:
        config, layers = setup.config, layers_of(setup.model)
        reducer, optimizer = setup.make_reducer()
        assert isinstance(reducer, PerLayerReducer)  # other compressors are refused
        links = star(options.root, config.timeout_s * WORKER_TIMEOUT_FACTOR)
        numels = [layer.numel for layer in layers]
        self._server: ParameterServer | None = None
        self._server_threads: list[threading.Thread] = []
        if dist.get_rank() == options.root:
            self._parameters = ServerParameters(
                layers,
                setup.compressor,
                optimizer,
                lr=config.lr,
                world_size=config.world_size,
                seed=config.seed,
                clip_norm=config.clip_norm,
            )
            self._server = options.server(self._parameters, config.world_size, config.timeout_s)
            sessions = {rank: self._server.join(rank) for rank in range(config.world_size)}
            for rank, link in links.items():
                thread = threading.Thread(
                    target=serve_worker,
                    args=(self._server, sessions[rank], link, numels),
                    name=f"server for rank {rank}",
                    daemon=True,
                )
                thread.start()
                self._server_threads.append(thread)
            server_side: Session | RemoteServer = sessions[options.root]
        else:
            server_side = RemoteServer(links[dist.get_rank()], numels)
        self._worker = AsyncWorker(reducer, server_side, layers, links.values(), guard=StepGuard(config.nonfinite))
        super().__init__(setup.model, [self._worker])

    @override
    def train_step(self, batch: Batch) -> StepReport:
        self._worker.start_step(batch.step, batch.lr)  # the learning rate travels with the push
        batch.backward(self.model)
        report = self._worker.finish_step()
        self._take(self._worker.answer)  # even if this step's push was dropped
        self.model.zero_grad()
        return report

    @override
    def synchronize(self) -> None:
        self._take(self._worker.synchronize())

    @override
    def state_dict(self) -> dict[str, Any]:
        self.synchronize()  # applies all pushes
        state = super().state_dict()
        if self._server is not None:
            state["server"] = self._server.state_dict() | {"parameters": self._parameters.state_dict()}
        dist.barrier()  # no rank continues before all ranks have their state
        return state

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._server is not None:
            self._server.load_state_dict(state["server"])
            self._parameters.load_state_dict(state["server"]["parameters"])
        dist.barrier()  # no rank pushes before the server is restored

    @override
    def close(self) -> None:
        super().close()
        for thread in self._server_threads:  # each thread ends when its worker has disconnected
            thread.join()

    @torch.no_grad()
    def _take(self, answer: ServerReply) -> None:
        for layer, packed in zip(self.layers, answer.parameters, strict=True):
            cast(nn.Parameter, layer.weight).copy_(unpack(packed).to_dense().view(layer.shape))
