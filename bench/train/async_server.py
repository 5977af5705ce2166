"""Asynchronous server training: workers push every layer's gradient and pull parameters at their own speed.

One rank also serves: it holds the parameters, the optimizer, and a thread for every other worker. Who waits for whom is
decided in `collectives/parameter_server/server.py`.

With `asp` a step of the run is any `world_size` batches, whoever used them: the run, and every stretch between two
evaluations, ends when the ranks together used as many batches as synchronous ones would. A slow rank uses fewer of its
own shard meanwhile and nobody stands idle for it; learning rate and epoch follow the count that a rank last heard.

Source: Dean et al., "Large scale distributed deep networks" (NIPS 2012); Ho et al., "More effective distributed ML via
a stale synchronous parallel parameter server" (NIPS 2013).
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import nn

from bench.core.config import RunConfig
from bench.optimizers.base import Optimizer
from bench.train.server_parameters import ServerParameters
from collectives.parameter_server.link import RemoteServer, serve
from collectives.parameter_server.server import (
    Answer,
    BoundedStaleness,
    Closing,
    OnArrival,
    ParameterServer,
    Session,
    Worker,
)
from collectives.payloads.base import Payload, unpack
from collectives.payloads.dense import Dense
from collectives.server import Server
from collectives.transport.base import Purpose, Traffic, Transport
from collectives.transport.process_group import ProcessGroupTransport
from compressors.base import Compressor
from compressors.ddp.communication_thread import Nonfinite, Outcome
from compressors.layer import Bucket, Layer, Sent, Step, layers_of
from compressors.state import Key

T = TypeVar("T")

# A worker must not give up before the server, which knows for whom it waits.
WORKER_TIMEOUT_FACTOR = 1.2


class AsynchronousServer:
    """The engine of `--collective server:mode=asp` and `mode=ssp`; its `ddp` is the network itself.

    Args:
        config, model, compressor, optimizer: of the run; the optimizer works at the server.
        collective: which rank serves, and how far parameters may lag behind.
    """

    def __init__(
        self, config: RunConfig, model: nn.Module, compressor: Compressor, collective: Server, optimizer: Optimizer
    ) -> None:
        self.model = self.ddp = model
        self.layers = layers_of(model)
        self._links = star(collective.root, config.timeout_s * WORKER_TIMEOUT_FACTOR)
        self._service: Service | None = None
        if dist.get_rank() == collective.root:
            world_size = dist.get_world_size()
            parameters = ServerParameters(
                self.layers, compressor, optimizer, lr=config.lr, world_size=world_size, seed=config.seed
            )
            server = make_server(collective, parameters, world_size, config.timeout_s)
            self._service = Service(server, self._links, numels_of(self.layers), own_rank=collective.root)
            worker: Worker = self._service.own_session
        else:
            worker = RemoteServer(self._links[dist.get_rank()], numels_of(self.layers))
        self._pusher = AsyncWorker(compressor, worker, self.layers, nonfinite=config.nonfinite)
        self._answer: Answer | None = None

    def start_step(self, step: Step, lr: float) -> None:
        """Tell the pusher where training is; the learning rate travels with the push."""
        self._pusher.start_step(step, lr)

    def finish_step(self) -> Outcome:
        """Push what is left and wait for the parameters of the next step; re-raises what failed in the thread."""
        outcome, self._answer = self._pusher.finish_step()
        return outcome

    def update(self, outcome: Outcome) -> int:
        """Take the parameters that the server sent, also after a step of which nothing was pushed."""
        assert self._answer is not None
        self._take(self._answer)
        for parameter in self.model.parameters():
            parameter.grad = None
        return self._answer.num_steps

    def settle(self) -> None:
        """Wait for all ranks and take the version that they left."""
        self._take(self._pusher.settle())

    def traffic(self) -> Mapping[Purpose, Traffic]:
        """As the links counted, together."""
        return {
            purpose: _together([link.traffic[purpose] for link in self._links.values()])
            for purpose in get_args(Purpose)
        }

    def residual_norms(self) -> dict[int, float]:
        """As the compressor keeps them."""
        return self._pusher.compressor.residual_norms()

    def last_encoded(self) -> Mapping[Key, Payload]:
        """As the compressor keeps it."""
        return self._pusher.compressor.last_encoded

    def close(self) -> None:
        """Leave, and where this rank serves, wait until all others left."""
        self._pusher.close()
        if self._service is not None:
            self._service.close()

    @torch.no_grad()
    def _take(self, answer: Answer) -> None:
        for layer, packed in zip(self.layers, answer.parameters, strict=True):
            weights = unpack(packed)
            assert layer.weight is not None
            assert isinstance(weights, Dense)
            layer.weight.copy_(weights.values.view(layer.shape))


class AsyncWorker:
    """The thread that encodes gradients as backward gives them and talks to the server.

    Args:
        compressor: this worker's.
        worker: its side of the server, used by the thread alone.
        layers: every trainable parameter; each gets a hook.
        nonfinite: what to do about a non-finite gradient; no vote is taken, "skip" drops this worker's own push.
    """

    def __init__(
        self, compressor: Compressor, worker: Worker, layers: Sequence[Layer], *, nonfinite: Nonfinite
    ) -> None:
        self.compressor = compressor
        self._worker = worker
        self._nonfinite = nonfinite
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pusher")
        self._jobs: list[Future[None]] = []
        self._step: Step | None = None
        self._lr = 0.0
        self._reset()
        for layer in layers:
            if layer.numel:
                parameter = cast(nn.Parameter, layer.weight)
                parameter.register_post_accumulate_grad_hook(lambda _, layer=layer: self._enqueue(layer))

    def start_step(self, step: Step, lr: float) -> None:
        """Call before the forward pass."""
        self._step, self._lr = step, lr
        self._reset()

    def finish_step(self) -> tuple[Outcome, Answer]:
        """Call after `backward`."""
        backward_ended = time.perf_counter()
        for job in self._jobs:
            job.result()
        answer = self._in_thread(self._end_clock)
        outcome = Outcome(
            skipped=self._saw_nonfinite,
            encode_s=self._encode_s,
            exchange_s=self._exchange_s,
            exposed_s=time.perf_counter() - backward_ended,
            sent=self._sent,
            staleness=answer.staleness,
        )
        return outcome, answer

    def settle(self) -> Answer:
        """As `Worker.settle`."""
        return self._in_thread(self._worker.settle)

    def close(self) -> None:
        """Leave the server and end the thread."""
        self._in_thread(self._worker.leave)
        self._thread.shutdown()

    def _in_thread(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result()

    def _reset(self) -> None:
        self._jobs = []
        self._saw_nonfinite = False
        self._encode_s = self._exchange_s = 0.0
        self._sent: list[Sent] = []

    def _enqueue(self, layer: Layer) -> None:
        self._jobs.append(self._thread.submit(self._push, layer))

    def _push(self, layer: Layer) -> None:
        assert self._step is not None
        assert layer.weight is not None
        started = time.perf_counter()
        gradient = cast(torch.Tensor, layer.weight.grad)
        if self._is_sound(gradient):
            bucket = Bucket(layers=[layer], gradients=[gradient.flatten()], step=self._step)
            payload = self.compressor.message(bucket)
            assert payload is not None  # layers without elements have no hook
            self._worker.push(layer.id, payload)
            self._encode_s += bucket.encode_s
            self._sent += bucket.sent
        self._exchange_s += time.perf_counter() - started

    def _is_sound(self, gradient: torch.Tensor) -> bool:
        """Whether this step's push can still be used: nothing is encoded after a layer that was not finite."""
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
            self.compressor.drop()
        else:
            self.compressor.commit()
        answer = self._worker.end_clock(
            Closing(index=self._step.index, epoch=self._step.epoch, lr=self._lr, dropped=self._saw_nonfinite)
        )
        self._exchange_s += time.perf_counter() - started
        return answer


class Service:
    """The server on the rank that serves: one thread for every worker elsewhere.

    Args:
        server: whose sessions they drive.
        links: one per other worker.
        numels: elements of every layer.
        own_rank: the worker of this process, which uses `own_session` directly.
    """

    def __init__(
        self, server: ParameterServer, links: Mapping[int, Transport], numels: Sequence[int], *, own_rank: int
    ) -> None:
        self._server = server
        self._numels = numels
        sessions = {rank: server.join(rank) for rank in range(server.world_size)}
        self.own_session = sessions[own_rank]
        self._threads = [
            threading.Thread(
                target=self._serve, args=(link, sessions[rank]), name=f"server for rank {rank}", daemon=True
            )
            for rank, link in links.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait until every worker left."""
        for thread in self._threads:
            thread.join()

    def _serve(self, link: Transport, session: Session) -> None:
        try:
            serve(link, session, self._numels)
        except Exception as error:  # noqa: BLE001 - re-raised in every worker, this process's own included
            self._server.fail(error)


def make_server(options: Server, parameters: ServerParameters, world_size: int, timeout_s: float) -> ParameterServer:
    """The server that `mode` and `staleness` ask for."""
    if options.mode == "ssp":
        return BoundedStaleness(parameters, world_size, timeout_s, staleness=options.staleness)
    return OnArrival(parameters, world_size, timeout_s)


def star(root: int, timeout_s: float) -> dict[int, Transport]:
    """Links between `root` (rank 0 on each) and every other rank, by that rank: all on the root, else this rank's own.

    Every rank must call. A link is a process group of its own, because threads must not share one.
    """
    links: dict[int, Transport] = {}
    for worker in range(dist.get_world_size()):
        if worker != root:
            group = dist.new_group([root, worker], timeout=datetime.timedelta(seconds=timeout_s), sort_ranks=False)
            if dist.get_rank() in (root, worker):
                links[worker] = ProcessGroupTransport(cast(dist.ProcessGroup, group), timeout_s=timeout_s)
    return links


def numels_of(layers: Sequence[Layer]) -> list[int]:
    """Elements of every layer, by its id."""
    return [layer.numel for layer in layers]


def _together(parts: Sequence[Traffic]) -> Traffic:
    return Traffic(
        messages=sum(part.messages for part in parts),
        nbytes=sum(part.nbytes for part in parts),
        seconds=sum(part.seconds for part in parts),
    )
