"""`LocalSteps`: every rank trains alone; every few steps the ranks average how far their parameters have moved.

Source: Stich 2018 (local SGD, arXiv:1805.09767), Lin et al. 2018 (post-local SGD, arXiv:1808.07217), Douillard et al.
2023 (DiLoCo, arXiv:2311.08105), Douillard et al. 2025 (Streaming DiLoCo, arXiv:2501.18512), Sarfi et al. 2025
(SparseLoCo, arXiv:2508.15706).
Differs: the outer copy is equal on all ranks bit for bit, because all ranks compute it from the same sum; buffers are
averaged; the compressor's residual is in units of the parameters and does not contain the outer learning rate
(published code applies that rate twice).
"""

import abc
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from collectives.allreduce import Ring
from collectives.base import Collective, Key
from collectives.payloads import Dense, Payload
from collectives.transport.base import Transport
from compressors.base import Compressor
from compressors.layer import Layer, Step, layers_of, memory_nbytes
from gradwire.exchange.communicator import CompressedCommunicator, set_parts_
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import Bucket, StepReport
from gradwire.local.fragments import Fragment, FragmentExchange, OuterOptimizer, combined, dealt
from gradwire.local.options import LocalOptions
from gradwire.step_guard import Nonfinite


class Members(abc.ABC):
    """Decides which ranks take part in the exchanges of `LocalSteps`: all (`FixedMembers`), or those present.

    Attributes:
        collective, transport: the collective and the transport with which `LocalSteps` begins.
    """

    collective: Collective
    transport: Transport

    @abc.abstractmethod
    def join(self, local: "LocalSteps", while_waiting: Callable[[], None], has_joined: Callable[[], None]) -> int:
        """Join the run before the first step; return the step of the run from which this rank trains.

        Args:
            local: this rank's local steps, which may get the state of the other ranks.
            while_waiting: called at least once a second while this rank waits for ranks that may be lost.
            has_joined: called after the first exchange of this rank, if this rank may be lost.
        """

    @abc.abstractmethod
    def average_(self, local: "LocalSteps", exchange: FragmentExchange, step: Step) -> Bucket:
        """Call `local.average_once_` until all ranks that take part have the mean."""

    def admit(self) -> None:  # noqa: B027 - optional
        """Let ranks that wait to join take part from the next exchange on; called after every exchange."""

    def close(self) -> None:  # noqa: B027 - optional
        """Leave the run."""


class FixedMembers(Members):
    """All ranks take part in every exchange, and the loss of a rank ends the run.

    Args:
        collective: sums payloads.
        transport: connects the ranks; with a delay, a background thread uses the transport during training.
    """

    def __init__(self, collective: Collective, transport: Transport) -> None:
        self.collective, self.transport = collective, transport

    @override
    def join(self, local: "LocalSteps", while_waiting: Callable[[], None], has_joined: Callable[[], None]) -> int:
        return 0

    @override
    def average_(self, local: "LocalSteps", exchange: FragmentExchange, step: Step) -> Bucket:
        return local.average_once_(exchange, step)


class LocalSteps(CompressedCommunicator):
    """Keeps an outer copy of a model's parameters, equal on all ranks, and exchanges how far ranks move from it.

    Call `start_step` before forward, `prepare_gradients_` after backward, `after_update` once the optimizer has updated
    the parameters, then `finish_step`. Between exchanges nothing is sent. All ranks must make the same number of steps;
    a step in which the optimizer changed nothing counts, too.

    Args:
        model: the network, not in DDP, with the same parameters on all ranks.
        options: how many steps lie between exchanges, and how the outer copy uses the means.
        compressor: encodes the outer copy minus this rank's parameters.
        members: who takes part in the exchanges, and the collective and transport that they use.
        nonfinite: what this rank does about NaN or infinity: "skip" its own step or difference, "raise", or "zero" the
            elements. Ranks do not vote about skipping.
        outer_optimizer: function that makes the optimizer of the outer copy, called once per fragment; None: SGD with
            the outer options in `options`.
    """

    def __init__(
        self,
        model: nn.Module,
        options: LocalOptions,
        compressor: Compressor,
        members: Members,
        *,
        nonfinite: Nonfinite = "skip",
        outer_optimizer: OuterOptimizer | None = None,
    ) -> None:
        super().__init__(layers_of(model), reducer_for(compressor), members.collective, members.transport, nonfinite)
        self.options, self._members = options, members
        outer_optimizer = outer_optimizer or functools.partial(
            torch.optim.SGD, lr=options.outer_lr, momentum=options.outer_momentum, nesterov=options.nesterov
        )
        self._fragments = [Fragment(layers, outer_optimizer) for layers in dealt(model, options.fragments)]
        self._model = model
        self._plain = self.bind(Ring())  # for buffers
        self._numel_of = {layer.id: layer.numel for layer in self.layers}
        self._number = 0  # exchanges begun
        self._weight = 1.0  # of this rank's difference, in the mean over ranks; 1 on average
        self._under_way: FragmentExchange | None = None
        self._buffer_places = _buffer_places(model)
        self._outer_buffers = [buffer.clone() for buffer in self._buffers()]  # as of the last exchange
        # This rank's parameters and buffers while the model's tensors contain the outer copy.
        self._inner: list[torch.Tensor] | None = None
        self._thread = None
        if options.delay:
            device = next(model.parameters()).device
            self._thread = ThreadPoolExecutor(1, "exchange", initializer=_compute_on, initargs=(device,))

    @property
    def averages_gradients(self) -> bool:
        """Return True in the first `start_after` steps, in which ranks average gradients and keep equal parameters."""
        return self.guard.index < self.options.start_after

    @property
    def num_steps(self) -> int:
        """Return how many steps of the run this rank has done."""
        return self.guard.index

    @property
    def period(self) -> int:
        """Return the number of steps of this rank between two exchanges of the same parameter."""
        return self.options.interval * self.options.fragments

    @override
    def start_step(self, step: Step) -> None:
        self.show_inner()
        # This does not set the step of the encoder of sums, because the thread may be reading that step.
        self._step, self._report = step, StepReport(encode_s=0.0, exchange_s=0.0, exposed_s=0.0)

    def prepare_gradients_(self, layers: Sequence[Layer] | None = None) -> bool:
        """Make the gradients ready for the optimizer; return False if this rank must not update its parameters.

        In the first `start_after` steps gradients become their mean over ranks, so all ranks return the same.

        Args:
            layers: the layers that the optimizer updates; None for all.
        """
        layers = self.layers if layers is None else layers
        weights = [layer.weight for layer in layers if layer.weight is not None]
        if self.averages_gradients:
            for weight in weights:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self._sum_encoder.step = self._step
            self.combine_([weight.grad for weight in weights if weight.grad is not None], layers=layers)
        return not self.guard.screen_([weight.grad for weight in weights if weight.grad is not None])

    @torch.no_grad()
    def after_update(self) -> None:
        """Count a step, and begin or end an exchange if one is due; every rank must call this method.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
            NonFiniteGradient: a difference is not finite, and `nonfinite` is "raise".
        """
        self.guard.index += 1
        local = self.guard.index - self.options.start_after
        if local == 0:
            for fragment in self._fragments:
                fragment.begin()
            buffers = self._buffers_to_send()
            with self.exchanging():
                self._share_buffers_(buffers)
            self._adopt_buffers(buffers)
        if local <= 0:
            return
        if (local + self.options.delay) % self.options.interval == 0:
            self._begin()
        if local % self.options.interval == 0:
            self._end()

    @override
    def finish_step(self) -> StepReport:
        """Return the report of the step."""
        return self._report

    def check_buffers(self) -> None:
        """Check that the model still has the buffers that are exchanged.

        Raises:
            RuntimeError: a buffer was added, removed or given another shape.
        """
        now = [getattr(module, name).shape for module, name in _buffer_places(self._model)]
        if now != [outer.shape for outer in self._outer_buffers]:
            raise RuntimeError(
                "a buffer of the model was added, removed or given another shape after local steps began; call close() "
                "before, and attach_local after such a change"
            )

    def begin_interval(self) -> None:
        """Continue as right after an exchange, to measure times; discard an exchange that is in progress.

        Every rank must call this method, between two steps. Afterwards the parameters are not those of a regular
        training.
        """
        self._settle()
        self._under_way = None
        self.guard.index = self.options.start_after

    @torch.no_grad()
    def show_outer(self) -> None:
        """Set the model to the outer copy and the last exchange's buffers, until `show_inner` or the next step.

        The outer copy, like these buffers, is equal on all ranks.
        """
        self._settle()
        if self._inner is None and self.guard.index > self.options.start_after:
            self._inner = [tensor.clone() for tensor in self._own()]
            for fragment in self._fragments:
                fragment.adopt()
            for buffer, outer in zip(self._buffers(), self._outer_buffers, strict=True):
                buffer.copy_(outer)

    @torch.no_grad()
    def show_inner(self) -> None:
        """Set the model to this rank's own parameters and buffers again, bit for bit."""
        if self._inner is not None:
            for tensor, own in zip(self._own(), self._inner, strict=True):
                tensor.copy_(own)
            self._inner = None

    @property
    @override
    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the tensors that this rank holds, by purpose.

        "outer" stands for the outer copy of parameters and buffers, equal on all ranks, and its optimizer's state.
        """
        of_fragments = sum(fragment.nbytes for fragment in self._fragments)
        return super().nbytes | {"outer": of_fragments + memory_nbytes(self._outer_buffers)}

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank needs to resume bit for bit; call this method after `show_outer`."""
        self._settle()
        return super().state_dict() | {
            "number": self._number,
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            "buffers": self._outer_buffers,
            "inner": self._own() if self._inner is None else self._inner,
            "under_way": None if self._under_way is None else self._under_way.state_dict(),
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the whole state with one that `state_dict` returned; load the model first."""
        super().load_state_dict(state)
        self._number = state["number"]
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self._outer_buffers = [buffer.clone() for buffer in state["buffers"]]
        self._inner = [own.clone() for own in state["inner"]]
        under_way = state["under_way"]
        self._under_way = None if under_way is None else FragmentExchange.of_state(under_way, self.layers)

    @override
    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        super().close()
        self._members.close()

    def connect(self, collective: Collective, open_transport: Callable[[], Transport]) -> None:
        """Close all connections; later exchanges use this collective and a new transport."""
        for bound in (self.collective, *self._others):
            bound.close()
        self._others.clear()
        self.transport.close()
        self.transport = open_transport()
        self.collective = collective.bind(self.transport, self._sum_encoder)
        self._plain = self.bind(Ring())

    def shared_state(self) -> dict[str, Any]:
        """Return the part of the state that is equal on all ranks between two exchanges, for `take_over`."""
        return {
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            "buffers": self._outer_buffers,
            "memory": self.reducer.memory.state_dict(),  # parts of it are equal on all ranks, as in PowerSGD
        }

    @torch.no_grad()
    def take_over(self, state: dict[str, Any], number: int) -> None:
        """Continue from the `shared_state` that other ranks have right before exchange `number`."""
        self._number, self.guard.index = number, number * self.options.interval
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
            fragment.adopt()
        self._adopt_buffers(state["buffers"])
        self.reducer.memory.load_state_dict(state["memory"])

    def average_once_(self, exchange: FragmentExchange, step: Step) -> Bucket:
        """Average the exchange's difference and buffers over ranks; the caller must then call `commit` or `drop`."""
        self._sum_encoder.step = step
        fragment = self._fragments[exchange.number % len(self._fragments)]
        bucket = Bucket(layers=fragment.layers, gradients=list(fragment.split(exchange.mean)), step=step)
        self.reducer.reduce(bucket, self._sum, self.transport)
        self._share_buffers_(exchange.buffers)
        return bucket

    def _begin(self) -> None:
        """Compute how far the next fragment (part of the model) has moved, and start the exchange of this difference.

        With a delay, the exchange runs in the background; otherwise it ends before this method returns.
        """
        started = time.perf_counter()
        fragment = self._fragments[self._number % len(self._fragments)]
        mean = fragment.difference()
        if self._weight != 1:
            mean *= self._weight
        if self.guard.screen_([mean]):
            self.guard.skip(f"a parameter is not finite after step {self.guard.index}")
        is_last = fragment is self._fragments[-1]
        buffers = self._buffers_to_send() if is_last else []
        exchange = self._under_way = FragmentExchange(number=self._number, mean=mean, buffers=buffers)
        index = self._number // len(self._fragments)
        self._number += 1
        step = dataclasses.replace(self._step, index=index)
        if self._thread is None:
            exchange.done.set_result(self._exchange(exchange, step))
        else:
            if mean.is_cuda:
                torch.cuda.current_stream(mean.device).synchronize()
            exchange.done = self._thread.submit(self._exchange, exchange, step)
        self._report.exposed_s = (self._report.exposed_s or 0.0) + time.perf_counter() - started

    def _end(self) -> None:
        """Wait for the exchange, move the outer copy by the mean, and update this rank's parameters from the copy."""
        exchange, started = self._under_way, time.perf_counter()
        assert exchange is not None
        report = exchange.done.result()
        self._report.add(report)
        fragment = self._fragments[exchange.number % len(self._fragments)]
        fragment.step(exchange.mean)
        fragment.adopt(self.options.alpha)
        if exchange.buffers:
            self._adopt_buffers(exchange.buffers)
        self._under_way = None
        self._report.exposed_s = (self._report.exposed_s or 0.0) + time.perf_counter() - started
        self._members.admit()

    @torch.no_grad()
    def _exchange(self, exchange: FragmentExchange, step: Step) -> StepReport:
        """Replace this rank's difference with the mean of what ranks sent, and make the buffers equal on all ranks.

        A difference is the outer copy minus a rank's own parameters.
        """
        started = time.perf_counter()
        if self.options.decay < 1:
            fragment = self._fragments[exchange.number % len(self._fragments)]
            self.reducer.scale_residuals_(self.options.decay, fragment.layers)
        bucket = self._members.average_(self, exchange, step)
        self.commit()
        if exchange.mean.is_cuda:
            torch.cuda.current_stream(exchange.mean.device).synchronize()
        busy_s = time.perf_counter() - started
        return StepReport(encode_s=bucket.encode_s, exchange_s=busy_s, exposed_s=0.0, encoded=bucket.encoded)

    def _sum(self, payload: Payload, key: Key) -> Payload:
        numels = [self._numel_of[layer_id] for layer_id in key]
        return combined(self.collective.sum(payload, key), numels, self.options)

    def _buffers_to_send(self) -> list[torch.Tensor]:
        """Return copies of the buffers, with elements of the outer copy where this rank's elements are not finite."""
        self.check_buffers()
        pairs = zip(self._buffers(), self._outer_buffers, strict=True)
        return [torch.where(buffer.isfinite(), buffer, outer) for buffer, outer in pairs]

    def _share_buffers_(self, buffers: Sequence[torch.Tensor]) -> None:
        """Replace floating-point buffers with their means over ranks, and all other buffers with those of rank 0."""
        # Training continues with running variances, so they become plain means; an evaluation pools them otherwise.
        if self.transport.world_size == 1:
            return
        floats = [buffer for buffer in buffers if buffer.is_floating_point()]
        others = [buffer for buffer in buffers if not buffer.is_floating_point() and buffer.numel()]
        with self.transport.counted_as("state"):
            if floats:
                flat = torch.cat([buffer.flatten().float() for buffer in floats])
                mean = torch.zeros_like(flat)
                self._plain.sum(Dense(flat), ()).add_to_(mean, divisor=self.transport.world_size)
                set_parts_(floats, mean)
            if others:
                flat = torch.cat([buffer.contiguous().view(-1).view(torch.uint8) for buffer in others])
                own = Dense(flat) if self.transport.rank == 0 else None
                received = self._plain.broadcast(own, 0, ()).values
                for buffer, part in zip(others, received.split([buffer.nbytes for buffer in others]), strict=True):
                    buffer.copy_(part.clone().view(buffer.dtype).view_as(buffer))

    def _adopt_buffers(self, buffers: list[torch.Tensor]) -> None:
        self._outer_buffers = buffers
        for buffer, outer in zip(self._buffers(), buffers, strict=True):
            buffer.copy_(outer)

    def _buffers(self) -> list[torch.Tensor]:
        # read again each time, because the model's code may have replaced a buffer with another tensor
        return [getattr(module, name) for module, name in self._buffer_places]

    def _own(self) -> list[torch.Tensor]:
        weights = [layer.weight.detach() for layer in self.layers if layer.weight is not None]
        return [*weights, *self._buffers()]

    def _settle(self) -> None:
        """Wait until the thread has ended the current exchange; `_end` uses the result later, after `delay` steps."""
        if self._under_way is not None:
            self._under_way.done.result()


def _buffer_places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the module and name of each buffer in the model's state dict; other buffers are constants.

    A buffer that several modules share is returned once.
    """
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    places: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) in saved:
                places.setdefault(id(buffer), (module, name))
    return list(places.values())


def _compute_on(device: torch.device) -> None:
    if device.type == "cuda":  # a new thread begins on the first GPU
        torch.cuda.set_device(device)
