"""CompressedCommunicator: a compressor and a collective at work among the ranks, on what one rank hands them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from collectives.base import BoundCollective, Collective, Key
from collectives.payloads.base import Payload
from collectives.payloads.bundle import Bundle
from collectives.payloads.dense import Dense
from collectives.transport.base import Purpose, Traffic, Transport, wait_all
from collectives.transport.sockets import open_transport
from compressors.base import Compressor
from compressors.ddp.encode_group import group_layers
from compressors.ddp.reducer import Reducer
from compressors.ddp.report import Bucket, EncodedLayer, StepReport
from compressors.layer import Layer, Memory, Step

Nonfinite = Literal["skip", "raise", "zero"]
Trigger = Literal["async", "sync"]
CombineOp = Literal["mean", "sum", "max"]


class CompressedCommunicator:
    """A pair at work for what is no bucket of DDP's: moments of an optimizer, factors.

    What a step sends through the compressor only proposes new residuals; `finish_step` accepts them.

    Args:
        layers: every trainable parameter.
        reducer: the compressor, and what this rank keeps for it.
        collective: sums payloads.
        transport: among the ranks, best over a process group of its own (`own_transport`); closed with the channel.

    Attributes:
        layers, reducer, transport: the parts.
        collective: bound to the transport.
    """

    def __init__(self, layers: Sequence[Layer], reducer: Reducer, collective: Collective, transport: Transport) -> None:
        self.layers = list(layers)
        self.reducer = reducer
        self.transport = transport
        self._downlink = Downlink(reducer.compressor, layers)
        self.collective = collective.bind(transport, self._downlink)
        self._others: list[BoundCollective] = []
        self._begin_step(
            Step(index=0, epoch=0, rank=transport.rank, world_size=transport.world_size, seed=0, warmup=False)
        )

    def start_step(self, step: Step) -> None:
        """Tell where training is; call before anything is sent in a step."""
        self._begin_step(step)

    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each layer's tensor by the mean over ranks of what was transmitted of it; every rank must call.

        Args:
            tensors: one per layer, contiguous; go through the compressor, with error feedback where it has that.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        started = time.perf_counter()
        bucket = Bucket(layers=self.layers, gradients=[tensor.view(-1) for tensor in tensors], step=self._step)
        self.reducer.reduce(bucket, self.collective.sum, self.transport)
        self._account(bucket.encoded, bucket.encode_s, started)

    def combine_(
        self, tensors: Sequence[torch.Tensor], op: CombineOp = "mean", layers: Sequence[Layer] | None = None
    ) -> None:
        """Replace each tensor by its mean, sum or maximum over ranks, every element of it; every rank must call.

        Args:
            tensors: of any shape, the same on all ranks; they travel as one message in their common type.
            op: what to do with the ranks' elements.
            layers: what each tensor is booked under; the channel's where None.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
            PayloadError: a maximum through `allgather`, which leaves terms.
        """
        started = time.perf_counter()
        layers = self.layers if layers is None else layers
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        key = tuple(layer.id for layer in layers)
        combined = torch.zeros_like(flat)
        total = self.collective.sum(Dense(flat), key, "max" if op == "max" else "sum")
        total.add_to_(combined, divisor=self.transport.world_size if op == "mean" else 1)
        for tensor, part in zip(tensors, combined.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
        self._account([_sent_whole(layer, tensor) for layer, tensor in zip(layers, tensors, strict=True)], 0.0, started)

    def average_(self, flat: torch.Tensor) -> None:
        """Replace the tensors of all layers, laid end to end, by their mean over ranks; every rank must call.

        Nothing is copied on the way where the collective adds in place, as the pool does for a buffer of its own.

        Args:
            flat: fp32 [elements of all layers].

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        started = time.perf_counter()
        total = self.collective.sum(Dense(flat), tuple(layer.id for layer in self.layers))
        assert isinstance(total, Dense)  # element-wise payloads stay what they are
        torch.div(total.values, self.transport.world_size, out=flat)
        parts = flat.split([layer.numel for layer in self.layers])
        self._account([_sent_whole(layer, part) for layer, part in zip(self.layers, parts, strict=True)], 0.0, started)

    def bind(self, collective: Collective) -> BoundCollective:
        """Return another collective over the same transport, closed with the channel; every rank must call."""
        bound = collective.bind(self.transport)
        self._others.append(bound)
        return bound

    def book(self, report: StepReport) -> None:
        """Add to this step's report what was exchanged over the transport by other means than this channel's."""
        self._report.add(report)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Book the seconds of a `with` block as those of an exchange beside which nothing else was done."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.book(StepReport(exchange_s=seconds, exposed_s=seconds))

    def on_any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; every rank must call."""
        return self.start_on_any_rank(flag)()

    def start_on_any_rank(self, flag: bool) -> Callable[[], bool]:
        """`on_any_rank` under way: what is returned waits for the others' flags; to be called once."""
        finish = self.transport.start_all_reduce_scalars([float(flag)], "max")
        return lambda: any(finish())

    def finish_step(self) -> StepReport:
        """Accept what this step proposed, and return what was sent in it."""
        self.commit()
        return self._report

    def commit(self) -> None:
        """Accept the state proposed since the last `commit` or `drop`."""
        self.reducer.commit()
        self.collective.commit()

    def drop(self) -> None:
        """Forget the proposed state: everything is bit for bit what it was before the step."""
        self.reducer.drop()
        self.collective.drop()

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Messages and bytes that this rank has sent so far, per purpose."""
        return self.transport.traffic

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """What this rank encoded in its last step, by the ids of the layers in it; see `Reducer`."""
        return self.reducer.last_encoded

    def residual_norms(self) -> dict[int, float]:
        """Return the L2 norm of what each layer has not sent yet, by layer id."""
        return self.reducer.residual_norms()

    def state_dict(self) -> dict[str, Any]:
        """Return all that training needs to go on bit for bit; differs between ranks, so save one per rank."""
        return {"reducer": self.reducer.state_dict(), "collective": self.collective.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace everything by what `state_dict` gave."""
        self.reducer.load_state_dict(state["reducer"])
        self.collective.load_state_dict(state["collective"])

    def close(self) -> None:
        """Release what the collective and the transport hold; every rank must call."""
        for collective in (self.collective, *self._others):
            collective.close()
        self.transport.close()

    def _begin_step(self, step: Step) -> None:
        self._step = self._downlink.step = step
        self._report = StepReport(encode_s=0.0, exchange_s=0.0, exposed_s=0.0)

    @property
    def exposed_s(self) -> float:
        """What this step has waited for until now."""
        return self._report.exposed_s or 0.0

    def _account(self, encoded: Sequence[EncodedLayer], encode_s: float, started: float) -> None:
        """Book one message that nothing else was done beside."""
        seconds = time.perf_counter() - started
        self.book(StepReport(encode_s=encode_s, exchange_s=seconds, exposed_s=seconds, encoded=list(encoded)))


def _sent_whole(layer: Layer, tensor: torch.Tensor) -> EncodedLayer:
    return EncodedLayer(layer=layer, payload="Dense", nbytes=tensor.nbytes, num_entries=tensor.numel(), seconds=0.0)


def own_transport(device: torch.device, timeout_s: float, group: dist.ProcessGroup | None = None) -> Transport:
    """Return a transport over a process group of its own, for two threads on one gloo group corrupt sums silently.

    Every rank of the group must call.

    Args:
        device: where tensors lie.
        timeout_s: longest wait for any one message.
        group: whose ranks and backend it shares; all ranks where None.
    """
    shared = group if group is not None else cast(dist.ProcessGroup, dist.group.WORLD)
    backends = dict(item.split(":") for item in dist.get_backend_config(shared).split(","))
    own = dist.new_group(
        dist.get_process_group_ranks(shared),
        timeout=datetime.timedelta(seconds=timeout_s),
        backend=backends[device.type],
        use_local_synchronization=shared != dist.group.WORLD,
    )
    return open_transport(cast(dist.ProcessGroup, own), device, timeout_s)


def await_command(transport: Transport) -> None:
    """Every rank tells rank 0 that its backward ended; rank 0 then commands all to start."""
    word = torch.zeros(1, dtype=torch.uint8, device=transport.device)
    with transport.counted_as("control"):
        if transport.rank == 0:
            others = range(1, transport.world_size)
            for source in others:
                transport.receive_into(word, source).wait()
            wait_all([transport.send(word, to) for to in others])
        else:
            transport.send(word, 0).wait()
            transport.receive_into(word, 0).wait()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are; in one pass, unless finite ones have a sum that is not."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def zero_nonfinite_(tensor: torch.Tensor, nonfinite: Nonfinite) -> bool:
    """Keep NaN and infinity away from whatever remembers: it would never recover.

    Args:
        tensor: floating; what is not finite becomes 0 ("zero"), or else all of it.
        nonfinite: what the run does about such a value.

    Returns:
        Whether the step must be left out.
    """
    if is_finite(tensor):
        return False
    if nonfinite == "zero":
        torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)
        return False
    tensor.zero_()
    return True


class Downlink:
    """What a server knows of the layers; implements the collectives' protocol of that name.

    Args:
        compressor: with its options.
        layers: every trainable parameter.

    Attributes:
        step: where training is; whoever runs the steps sets it.
    """

    def __init__(self, compressor: Compressor, layers: Sequence[Layer]) -> None:
        self.step = Step(index=0, epoch=0, rank=0, world_size=1, seed=0)
        self._compressor = compressor
        self._layer_of = {layer.id: layer for layer in layers}
        self._memory = Memory()
        self.commit, self.drop = self._memory.commit, self._memory.drop
        self.state_dict, self.load_state_dict = self._memory.state_dict, self._memory.load_state_dict

    def numel(self, layer_id: int) -> int:
        """Return the elements of a layer."""
        return self._layer_of[layer_id].numel

    def encode(self, total: torch.Tensor, layers: Key) -> Payload:
        """Return the answer; layers that the policy sends dense stay so.

        Args:
            total: fp32 [numel], the layers' sums end to end.
            layers: their ids, in the order in which a worker's message holds them.
        """
        at, memory = self.step, self._memory
        # Nobody adds to an answer, and what is drawn for it is drawn for no rank's own message.
        step = dataclasses.replace(at, memory=memory, rank=at.world_size + at.rank, world_size=1)
        units = group_layers(self._compressor, [self._layer_of[layer_id] for layer_id in layers], step)
        payloads = [
            Dense(part.clone()) if unit.dense else self._compressor.encode(part, unit.layer, step)
            for unit, part in zip(units, torch.split(total, [unit.layer.numel for unit in units]), strict=True)
        ]
        return payloads[0] if len(payloads) == 1 else Bundle(payloads)
