"""The worker's side: a thread encodes each gradient during backward and sends it to the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from bench.strategies.async_server.server import ServerParameters, Service, star
from bench.strategies.base import BoundStrategy, Setup
from collectives.base import Key
from collectives.parameter_server.link import RemoteServer
from collectives.parameter_server.server import Answer, ClockEnd, ParameterServer, Worker
from collectives.payloads.base import Payload, unpack
from collectives.payloads.dense import Dense
from collectives.transport.base import Purpose, Traffic, Transport
from compressors.ddp.communicator import Nonfinite
from compressors.ddp.reducer import PerLayerReducer
from compressors.ddp.report import Bucket, EncodedLayer, StepReport
from compressors.layer import Layer, Step, layers_of

T = TypeVar("T")


class AsyncWorker:
    """Push each layer's gradient as a separate message and pull the parameters of the next step.

    Args:
        reducer: this worker's reducer.
        server: this worker's connection to the server; only the thread uses it.
        layers: all trainable parameters; each gets a hook.
        links: the transports whose traffic counts as this rank's.
        nonfinite: what to do about a non-finite gradient; ranks do not vote, "skip" drops only this worker's push.

    Attributes:
        answer: the server's last answer; unset before the first `finish_step`.
    """

    answer: Answer

    def __init__(
        self,
        reducer: PerLayerReducer,
        server: Worker,
        layers: Sequence[Layer],
        links: Iterable[Transport],
        *,
        nonfinite: Nonfinite,
    ) -> None:
        self.reducer = reducer
        self._server = server
        self._links = list(links)
        self._nonfinite = nonfinite
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._jobs: list[Future[None]] = []
        self._step: Step | None = None
        self._lr = 0.0
        self._reset()
        for layer in layers:
            if layer.numel:
                parameter = cast(nn.Parameter, layer.weight)
                parameter.register_post_accumulate_grad_hook(lambda _, layer=layer: self._enqueue(layer))

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Return the sum of the links' traffic, per purpose."""
        return {
            purpose: sum((link.traffic[purpose] for link in self._links), Traffic()) for purpose in get_args(Purpose)
        }

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """Return what this rank encoded in its last step, by the ids of the layers in each payload."""
        return self.reducer.last_encoded

    def residual_norms(self) -> dict[int, float]:
        """Return the L2 norm of each layer's residual, by layer id."""
        return self.reducer.residual_norms()

    def start_step(self, step: Step, lr: float) -> None:
        """Begin a step; call before the forward pass."""
        self._step, self._lr = step, lr
        self._reset()

    def finish_step(self) -> StepReport:
        """Wait for all pushes and for the next step's parameters. Raises what failed in the thread."""
        backward_ended = time.perf_counter()
        for job in self._jobs:
            job.result()
        self.answer = self._in_thread(self._end_clock)
        return StepReport(
            skipped=self._saw_nonfinite,
            encode_s=self._encode_s,
            exchange_s=self._exchange_s,
            exposed_s=time.perf_counter() - backward_ended,
            encoded=self._encoded,
            staleness=self.answer.staleness,
        )

    def synchronize(self) -> Answer:
        """Wait until the server has applied every push. See `Worker.synchronize`."""
        return self._in_thread(self._server.synchronize)

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker keeps from step to step, without the server's state."""
        return self.reducer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.reducer.load_state_dict(state)

    def close(self) -> None:
        """Disconnect from the server and end the thread."""
        self._in_thread(self._server.disconnect)
        self._thread.shutdown()

    def _in_thread(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result()

    def _reset(self) -> None:
        self._jobs = []
        self._saw_nonfinite = False
        self._encode_s = self._exchange_s = 0.0
        self._encoded: list[EncodedLayer] = []

    def _enqueue(self, layer: Layer) -> None:
        self._jobs.append(self._thread.submit(self._push, layer))

    def _push(self, layer: Layer) -> None:
        assert self._step is not None
        assert layer.weight is not None
        started = time.perf_counter()
        gradient = cast(torch.Tensor, layer.weight.grad)
        if self._is_sound(gradient):
            bucket = Bucket(layers=[layer], gradients=[gradient.flatten()], step=self._step)
            payload = self.reducer.message(bucket)
            assert payload is not None  # layers without elements have no hook
            self._server.push(layer.id, payload)
            self._encode_s += bucket.encode_s
            self._encoded += bucket.encoded
        self._exchange_s += time.perf_counter() - started

    def _is_sound(self, gradient: torch.Tensor) -> bool:
        """Return True if all gradients of this step so far are usable; after a non-finite layer, none is encoded."""
        if not bool(torch.isfinite(gradient).all()):
            if self._nonfinite == "zero":
                torch.nan_to_num_(gradient, nan=0.0, posinf=0.0, neginf=0.0)
            else:
                self._saw_nonfinite = True
        return not self._saw_nonfinite

    def _end_clock(self) -> Answer:
        assert self._step is not None
        started = time.perf_counter()
        if self._saw_nonfinite:
            self.reducer.drop()
        else:
            self.reducer.commit()
        answer = self._server.end_clock(
            ClockEnd(index=self._step.index, epoch=self._step.epoch, lr=self._lr, dropped=self._saw_nonfinite)
        )
        self._exchange_s += time.perf_counter() - started
        return answer


# Workers wait longer than the server: the server's timeout message can name the rank that it waits for.
WORKER_TIMEOUT_FACTOR = 1.2

# Makes the server from (parameters, number of workers, timeout in seconds).
MakeServer = Callable[[ServerParameters, int, float], ParameterServer]


class AsyncTraining(BoundStrategy):
    """Run this rank's worker and, on the rank `root`, also the server with its threads.

    Args:
        setup: what this rank trains with; only the server uses the optimizer.
        root: the rank that is also the server.
        make_server: makes the server; called on `root` only.
    """

    exchange: AsyncWorker

    def __init__(self, setup: Setup, *, root: int, make_server: MakeServer) -> None:
        config, layers = setup.config, layers_of(setup.model)
        reducer, optimizer = setup.make_reducer()
        assert isinstance(reducer, PerLayerReducer)  # other compressors are refused
        links = star(root, config.timeout_s * WORKER_TIMEOUT_FACTOR)
        numels = [layer.numel for layer in layers]
        self._service: Service | None = None
        if dist.get_rank() == root:
            parameters = ServerParameters(
                layers,
                setup.compressor,
                optimizer,
                lr=config.lr,
                world_size=config.world_size,
                seed=config.seed,
            )
            self._parameters = parameters
            server = make_server(parameters, config.world_size, config.timeout_s)
            self._service = Service(server, links, numels, own_rank=root)
            server_side: Worker = self._service.own_session
        else:
            server_side = RemoteServer(links[dist.get_rank()], numels)
        worker = AsyncWorker(reducer, server_side, layers, links.values(), nonfinite=config.nonfinite)
        super().__init__(setup.model, setup.model, worker)

    @override
    def start_step(self, step: Step, lr: float) -> None:
        self.exchange.start_step(step, lr)  # the learning rate travels with the push

    @override
    def update(self, outcome: StepReport) -> int:
        """Copy the server's parameters into the model, even if this step's push was dropped."""
        self._take(self.exchange.answer)
        for parameter in self.model.parameters():
            parameter.grad = None
        return self.exchange.answer.num_steps

    @override
    def synchronize(self) -> None:
        self._take(self.exchange.synchronize())

    @override
    def drain(self) -> None:
        self.synchronize()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Apply all pushes, then return the state; no rank continues until all ranks have theirs."""
        self.synchronize()
        state = super().state_dict()
        if self._service is not None:
            state["server"] = self._service.server.state_dict() | {"parameters": self._parameters.state_dict()}
        dist.barrier()
        return state

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._service is not None:
            self._service.server.load_state_dict(state["server"])
            self._parameters.load_state_dict(state["server"]["parameters"])
        dist.barrier()  # no rank pushes before the server is restored

    @override
    def close(self) -> None:
        """Disconnect; on the server's rank, wait until all other workers have disconnected."""
        super().close()
        if self._service is not None:
            self._service.close()

    @torch.no_grad()
    def _take(self, answer: Answer) -> None:
        for layer, packed in zip(self.layers, answer.parameters, strict=True):
            weights = unpack(packed)
            assert layer.weight is not None
            assert isinstance(weights, Dense)
            layer.weight.copy_(weights.values.view(layer.shape))
