"""One worker of the asynchronous parameter server, which pushes gradients during backward and pulls parameters."""

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast, get_args

import torch
from torch import nn

from bench.extensions.async_server.server import (
    ClockEnd,
    RemoteServer,
    ServerReply,
    Session,
)
from collectives.base import Key
from collectives.payloads import Payload
from collectives.transport.base import Purpose, Traffic, Transport
from compressors.layer import Layer, Step
from gradwire.exchange.reducer import PerLayerReducer
from gradwire.exchange.report import Bucket, EncodedLayer, StepReport
from gradwire.step_guard import StepGuard


class AsyncWorker:
    """Push each layer's gradient as a separate message and pull the parameters of the next step.

    A thread encodes each gradient during backward and sends it to the server.

    Args:
        reducer: compresses this worker's gradients and keeps its residuals.
        server: this worker's connection to the server; only the encoding thread uses it.
        layers: all trainable parameters; each gets a backward hook.
        links: the transports whose traffic counts as this rank's.
        guard: checks gradients for non-finite values. With "skip", only this worker's gradients of the step are
            dropped, because ranks do not vote on skipping.

    Attributes:
        answer: the server's last answer, with the parameters of the next step; unset before the first `finish_step`.
    """

    answer: ServerReply

    def __init__(
        self,
        reducer: PerLayerReducer,
        server: Session | RemoteServer,
        layers: Sequence[Layer],
        links: Iterable[Transport],
        *,
        guard: StepGuard,
    ) -> None:
        self.reducer = reducer
        # The reducer has the only state that a worker keeps from step to step; the server saves its own state.
        self.state_dict, self.load_state_dict = reducer.state_dict, reducer.load_state_dict
        self.residual_norms = reducer.residual_norms
        self._server = server
        self._links = list(links)
        self._guard = guard
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        for layer in layers:
            if layer.numel:
                cast(nn.Parameter, layer.weight).register_post_accumulate_grad_hook(
                    lambda _, layer=layer: self._jobs.append(self._thread.submit(self._push, layer))
                )

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Return, by purpose, the bytes of the tensors that this rank's reducer keeps from step to step."""
        return self.reducer.nbytes

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Return the messages and bytes that this rank has sent over all its links, per purpose."""
        return {
            purpose: sum((link.traffic[purpose] for link in self._links), Traffic()) for purpose in get_args(Purpose)
        }

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """Return the payloads that this rank encoded in its last step, by the ids of the layers in each payload."""
        return self.reducer.last_encoded

    def start_step(self, step: Step, lr: float) -> None:
        """Set the current step and its learning rate; call before the forward pass."""
        self._step, self._lr = step, lr
        self._jobs: list[Future[None]] = []
        self._guard.saw_nonfinite = False
        self._encode_s = self._exchange_s = 0.0
        self._encoded: list[EncodedLayer] = []

    def finish_step(self) -> StepReport:
        """Wait until all gradients are sent and the next step's parameters are received (`answer`).

        Return the step's report. An exception of the encoding thread is raised here.
        """
        backward_ended = time.perf_counter()
        for job in self._jobs:
            job.result()
        self.answer = self._thread.submit(self._end_clock).result()
        behind = self.answer.staleness
        return StepReport(
            skipped=self._guard.saw_nonfinite,
            encode_s=self._encode_s,
            exchange_s=self._exchange_s,
            exposed_s=time.perf_counter() - backward_ended,
            encoded=self._encoded,
            num_steps=self.answer.num_steps,
            figures={} if behind is None else {"staleness": behind},
        )

    def synchronize(self) -> ServerReply:
        """Wait until the server has applied the gradients of all workers, and return its answer with the parameters.

        Every worker must call this method.
        """
        return self._thread.submit(self._server.synchronize).result()

    def close(self) -> None:
        """Disconnect from the server and end the thread."""
        if isinstance(self._server, RemoteServer):
            self._thread.submit(self._server.disconnect).result()
        self._thread.shutdown()

    def _push(self, layer: Layer) -> None:
        started = time.perf_counter()
        gradient = cast(torch.Tensor, cast(nn.Parameter, layer.weight).grad)
        self._guard.screen_([gradient])
        if not self._guard.saw_nonfinite:  # after a non-finite gradient, no layer is encoded in this step
            bucket = Bucket(layers=[layer], gradients=[gradient.flatten()], step=self._step)
            payload = self.reducer.message(bucket)
            assert payload is not None  # layers without elements have no hook
            self._server.push(layer.id, payload)
            self._encode_s += bucket.encode_s
            self._encoded += bucket.encoded
        self._exchange_s += time.perf_counter() - started

    def _end_clock(self) -> ServerReply:
        started = time.perf_counter()
        if self._guard.saw_nonfinite:
            self.reducer.drop()
        else:
            self.reducer.commit()
        answer = self._server.end_clock(
            ClockEnd(
                index=self._step.index, epoch=self._step.epoch or 0, lr=self._lr, dropped=self._guard.saw_nonfinite
            )
        )
        self._exchange_s += time.perf_counter() - started
        return answer
