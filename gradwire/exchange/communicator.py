"""`CompressedCommunicator`: exchange tensors among the ranks through a compressor and a collective."""

import contextlib
import dataclasses
import datetime
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from collectives.base import BoundCollective, Collective
from collectives.payloads import Dense, Payload
from collectives.schedule.rounds import LayerStretch
from collectives.transport.base import Transport, wait_all
from collectives.transport.sockets import open_transport
from compressors.base import Compressor, PerLayer
from compressors.layer import Layer, Memory, Step
from compressors.parts.buckets import bundled, split
from gradwire.exchange.encode_group import group_layers
from gradwire.exchange.packed_state import bits_hash
from gradwire.exchange.reducer import Reducer
from gradwire.exchange.report import Bucket, EncodedLayer, StepReport
from gradwire.step_guard import Nonfinite, StepGuard, parameters_of

Trigger = Literal["async", "sync"]
CombineOp = Literal["mean", "sum", "max"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookSettings:
    """Settings of a hook that do not depend on its compressor or collective.

    Attributes:
        seed: seed of the compressor's own random numbers, the same on every rank.
        nonfinite: what to do about NaN or infinity: "skip" the step on all ranks, "raise", or "zero" the elements.
        timeout_s: longest wait for any one message, in seconds.
        trigger: "async" sends each bucket during backward, "sync" after all ranks have finished backward.
        scaler: a gradient scaler: gradients are divided by its scale before compression, and their mean is multiplied
            by it afterwards.
        clip_norm: largest L2 norm of a rank's gradient, which is clipped before it is sent; None: not clipped.
    """

    seed: int
    nonfinite: Nonfinite
    timeout_s: float
    trigger: Trigger = "async"
    scaler: torch.amp.GradScaler | None = None
    clip_norm: float | None = None


class CompressedCommunicator:
    """Exchanges tensors that are not in DDP's buckets, such as an optimizer's moments or Kronecker factors.

    A step computes new residuals (the parts that the compressor did not send), which replace the current residuals only
    in `finish_step`.

    Args:
        layers: every trainable parameter.
        reducer: the compressor with this rank's state.
        collective: sums payloads.
        transport: connects the ranks, preferably over a separate process group (`own_transport`); `close` closes it.
        nonfinite: what `guard` does about NaN or infinity, as in `HookSettings`.

    Attributes:
        layers, reducer, transport: the arguments.
        guard: counts steps if the caller does not, and checks gradients and the model.
        collective: the collective, bound to the transport.
        traffic: the messages and bytes that this rank has sent so far, per purpose.
        residual_norms: a function without arguments that returns, by layer id, the L2 norm of each layer's residual
            (the part of its gradients that was not sent yet).
        last_encoded: this rank's payloads of the last step, by the ids of the layers in each payload; see `Reducer`.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        reducer: Reducer,
        collective: Collective,
        transport: Transport,
        nonfinite: Nonfinite = "skip",
    ) -> None:
        self.layers = list(layers)
        self.guard = StepGuard(nonfinite)
        self.reducer = reducer
        self.transport = transport
        self.traffic, self.residual_norms = transport.traffic, reducer.residual_norms
        self.last_encoded = reducer.last_encoded
        self._sum_encoder = CompressedSums(reducer.compressor, layers)
        self.collective = collective.bind(transport, self._sum_encoder)
        self._others: list[BoundCollective] = []
        step = Step(index=0, epoch=0, rank=transport.rank, world_size=transport.world_size, seed=0, warmup=False)
        CompressedCommunicator.start_step(self, step)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of finished epochs, which determines how much the compressor sends in its warm-up epochs.

        Without this call, a compressor skips its warm-up epochs, if it has any, and a hook warns about that.
        """
        self.guard.set_epoch(epoch)

    def step_of(self, index: int, epoch: int | None, seed: int) -> Step:
        """Return this rank's `Step` number `index`; if `epoch` is None, the compressor skips its warm-up epochs."""
        return Step(index=index, epoch=epoch, rank=self.transport.rank, world_size=self.transport.world_size, seed=seed)

    def start_step(self, step: Step) -> None:
        """Begin a training step; call this method before anything is sent in the step."""
        self._step = self._sum_encoder.step = step
        self._report = StepReport(encode_s=0.0, exchange_s=0.0, exposed_s=0.0)

    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each layer's tensor with the mean over ranks of what the compressor sent.

        Every rank must call this method.

        Args:
            tensors: one contiguous tensor per layer; they are compressed, with the compressor's error feedback.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        with self.exchanging() as report:
            bucket = Bucket(layers=self.layers, gradients=[tensor.view(-1) for tensor in tensors], step=self._step)
            self.reducer.reduce(bucket, self.collective.sum, self.transport)
            report.encoded, report.encode_s = bucket.encoded, bucket.encode_s

    def combine_(
        self, tensors: Sequence[torch.Tensor], op: CombineOp = "mean", layers: Sequence[Layer] | None = None
    ) -> None:
        """Replace each tensor with its mean, sum or maximum over ranks, sent uncompressed.

        Every rank must call this method.

        Args:
            tensors: tensors whose shapes are equal on all ranks; they travel as one message in their common dtype.
            op: how to combine the ranks' elements.
            layers: for each tensor, the layer under which its bytes are reported; None for `self.layers`.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
            PayloadError: the collective cannot compute a maximum (`allgather`).
        """
        with self.exchanging() as report:
            layers = self.layers if layers is None else layers
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            combined = torch.zeros_like(flat)
            total = self.collective.sum(
                Dense(flat), tuple(layer.id for layer in layers), "max" if op == "max" else "sum"
            )
            total.add_to_(combined, divisor=self.transport.world_size if op == "mean" else 1)
            set_parts_(tensors, combined)
            report.encoded = _sent_whole(layers, tensors)

    def average_(self, flat: torch.Tensor) -> None:
        """Replace the concatenated tensors of all layers with their mean over ranks, sent uncompressed.

        Every rank must call this method. Nothing is copied if the collective adds in place, as `pool` does for a buffer
        that `pool` has allocated.

        Args:
            flat: fp32 [elements of all layers].

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        with self.exchanging() as report:
            total = self.collective.sum(Dense(flat), tuple(layer.id for layer in self.layers))
            assert isinstance(total, Dense)  # a sum of `Dense` payloads is `Dense`
            torch.div(total.values, self.transport.world_size, out=flat)
            report.encoded = _sent_whole(self.layers, flat.split([layer.numel for layer in self.layers]))

    def bind(self, collective: Collective) -> BoundCollective:
        """Bind another collective to the same transport and return it; every rank must call this method."""
        bound = collective.bind(self.transport)
        self._others.append(bound)
        return bound

    def book(self, report: StepReport) -> None:
        """Add to this step's report the report of an exchange that did not use this communicator's methods."""
        self._report.add(report)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[StepReport]:
        """Time a `with` block, and add its seconds to the step's report as an exchange for which training waited.

        The block gets a `StepReport`, to which it may add the layers that it encodes.
        """
        report, started = StepReport(), time.perf_counter()
        yield report
        report.exchange_s = report.exposed_s = time.perf_counter() - started
        self.book(report)

    def start_on_any_rank(self, flag: bool) -> Callable[[], bool]:
        """Send this rank's flag, and return a function that waits and returns True if the flag of any rank is True.

        Every rank must call this method, and then call the returned function once.
        """
        finish = self.transport.start_all_reduce_scalars([float(flag)], "max")
        return lambda: any(finish())

    def difference_of_weights(self, optimizers: Iterable[torch.optim.Optimizer]) -> str:
        """Compare the model's weights and all other parameters of these optimizers between ranks, bit for bit.

        Every rank must call this method. Return a message for the user if some differ, otherwise an empty string.
        """
        of_layers = {layer.name: [cast(torch.Tensor, layer.weight)] for layer in self.layers}
        known = {id(layer.weight) for layer in self.layers}
        updated = {id(each): each for optimizer in optimizers for each in parameters_of(optimizer)}
        others = [each for key, each in updated.items() if key not in known]
        tensors = {**of_layers, "a parameter of an optimizer that is not in the model": others}
        hashes = [int(bits_hash(each)[:12], 16) for each in tensors.values()]  # fp64 holds 48 bits exactly
        most = self.transport.all_reduce_scalars([*hashes, *(-each for each in hashes)], "max")
        highest, lowest = most[: len(hashes)], most[len(hashes) :]
        names = [name for name, high, low in zip(tensors, highest, lowest, strict=True) if high != -low]
        more = f" and {len(names) - 1} more layers differ" if len(names) > 1 else " differs"
        if not names:
            return ""
        return (
            f"after the first update {names[0]}{more} between ranks, which then train different models; "
            "begin with equal weights, and update them in the same way on every rank"
        )

    def finish_step(self) -> StepReport:
        """Make the new state of this step (for example residuals) the current state, and return the step's report."""
        self.commit()
        return self._report

    def conclude(self, *, is_nonfinite: bool) -> None:
        """Make the step's new state the current state; if `is_nonfinite`, discard the new state and skip the step.

        Args:
            is_nonfinite: True if a gradient of any rank was not finite.

        Raises:
            NonFiniteGradient: `is_nonfinite` is True, and `nonfinite` is "raise".
        """
        if not is_nonfinite:
            self.commit()
            return
        self.drop()
        self._report.skipped = True
        self.guard.skip(f"a gradient was not finite at step {self._step.index}")

    def commit(self) -> None:
        """Make the state that exchanges have newly computed, such as residuals, the current state."""
        self.reducer.commit()
        self.collective.commit()
        self._sum_encoder.memory.commit()
        self.last_encoded = self.reducer.last_encoded

    def drop(self) -> None:
        """Discard the state that exchanges have newly computed: the state is then bit for bit as before the step."""
        self.reducer.drop()
        self.collective.drop()
        self._sum_encoder.memory.drop()

    @property
    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the tensors that this rank holds, by purpose; read this property between two steps.

        "residual": what was not sent yet; "proposed": the memory for the next residuals; "momentum": momentum buffers
        and the memory for the next ones; "memory": the compressor's own state; "buffers": memory that is reused from
        step to step (with PowerSGD also the last gradients); "payloads": the last step's payloads; "collective": state
        of the collectives.
        """
        of_collectives = sum(collective.nbytes for collective in (self.collective, *self._others))
        return self.reducer.nbytes | {"collective": of_collectives + self._sum_encoder.memory.nbytes}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for resuming bit for bit; every rank must save its own, because ranks differ."""
        return {
            "step": self.guard.index,
            "reducer": self.reducer.state_dict(),
            "collective": self.collective.state_dict(),
            "sums": self._sum_encoder.memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the whole state with one that `state_dict` returned; load the model's weights first."""
        self.guard.index = state["step"]
        self.reducer.load_state_dict(state["reducer"])
        self.collective.load_state_dict(state["collective"])
        self._sum_encoder.memory.load_state_dict(state["sums"])

    def close(self) -> None:
        """Close the collectives and the transport; every rank must call this method."""
        self.guard.closed = True
        for collective in (self.collective, *self._others):
            collective.close()
        self.transport.close()

    @property
    def exposed_s(self) -> float:
        """Return the seconds in which training waited for exchanges since the last `start_step`."""
        return self._report.exposed_s or 0.0


OPEN: "weakref.WeakSet[CompressedCommunicator]" = weakref.WeakSet()
"""All hooks that `attach` and `attach_local` have returned; some of them may be closed."""


def close_earlier_hooks(layers: Iterable[Layer]) -> None:
    """Close earlier hooks that exchange any of these parameters, for example after an exception ended their training.

    Every rank must call this function. Without it, two hooks would exchange the same gradients.
    """
    ids = {id(layer.weight) for layer in layers}
    for hook in list(OPEN):
        if not ids.isdisjoint(id(layer.weight) for layer in hook.layers):
            OPEN.discard(hook)
            hook.close()


def _sent_whole(layers: Sequence[Layer], tensors: Sequence[torch.Tensor]) -> list[EncodedLayer]:
    return [
        EncodedLayer(layer=layer, payload="Dense", nbytes=tensor.nbytes, num_entries=tensor.numel(), seconds=0.0)
        for layer, tensor in zip(layers, tensors, strict=True)
    ]


def set_parts_(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy into each tensor, of any shape, its part of `flat` [elements of all tensors, end to end]."""
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def own_transport(device: torch.device, timeout_s: float, group: dist.ProcessGroup | None = None) -> Transport:
    """Return a transport over a new process group; every rank of `group` must call this function.

    The group must be new, because two threads that use the same gloo group silently corrupt sums.

    Args:
        device: the device of the tensors.
        timeout_s: longest wait for any one message, in seconds.
        group: process group from which the new group takes its ranks and backend; None: the default group, which has
            all ranks.
    """
    shared = group if group is not None else cast(dist.ProcessGroup, dist.group.WORLD)
    own = dist.new_group(
        dist.get_process_group_ranks(shared),
        timeout=datetime.timedelta(seconds=timeout_s),
        backend=dict(item.split(":") for item in dist.get_backend_config(shared).split(","))[device.type],
        use_local_synchronization=shared != dist.group.WORLD,
    )
    return open_transport(cast(dist.ProcessGroup, own), device, timeout_s)


@torch.no_grad()
def copy_from_first_rank_(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace these tensors with those of a group's first rank; every rank of the group must call this function."""
    for tensor in tensors:
        first = tensor.contiguous()
        dist.broadcast(first, group=group, group_src=0)
        tensor.copy_(first)


def await_command(transport: Transport) -> None:
    """Tell rank 0 that backward has ended on this rank, and wait until backward has ended on all ranks.

    Every rank must call this function.
    """
    word = torch.zeros(1, dtype=torch.uint8, device=transport.device)
    with transport.counted_as("control"):
        if transport.rank != 0:
            transport.send(word, 0).wait()
            transport.receive_into(word, 0).wait()
            return
        others = range(1, transport.world_size)
        for source in others:
            transport.receive_into(word, source).wait()
        wait_all([transport.send(word, to) for to in others])


class CompressedSums:
    """Encodes sums with the compressor: a server's answers or a ring's partial sums (a `collectives.base.SumEncoder`).

    Args:
        compressor: the compressor, with its options.
        layers: every trainable parameter.

    Attributes:
        step: the training step; the communicator sets it.
        memory: the compressor's state for sums.
    """

    def __init__(self, compressor: Compressor, layers: Sequence[Layer]) -> None:
        self.step = Step(index=0, epoch=0, rank=0, world_size=1, seed=0)
        self.memory = Memory()
        self._compressor = compressor
        self._layer_of = {layer.id: layer for layer in layers}

    def numel(self, layer_id: int) -> int:
        """Return the number of elements of a layer."""
        return self._layer_of[layer_id].numel

    def encode(self, total: torch.Tensor, stretches: Sequence[LayerStretch], hop: int = 0) -> Payload:
        """Return a sum in encoded form; layers that ranks send uncompressed stay uncompressed.

        Args:
            total: fp32 [elements of all stretches].
            stretches: the consecutive parts of `total`: each is a whole layer, or a range of the elements that ranks
                encode into one payload.
            hop: number of ranks that encoded these elements before.
        """
        # The encoded sum is not summed with others, so the world size is 1. The rank number is larger than that of any
        # rank in the run, so that the sum gets its own random numbers.
        rank = (1 + hop) * self.step.world_size + self.step.rank
        step = dataclasses.replace(self.step, memory=self.memory, rank=rank, world_size=1)
        layers = [self._layer_of[stretch.layer] for stretch in stretches]
        if total.numel() < sum(layer.numel for layer in layers):  # a part, which is encoded as a flat layer
            flat = Layer(id=layers[0].id, name=layers[0].name, shape=(total.numel(),), numel=total.numel())
            return cast(PerLayer, self._compressor).encode(total, flat, step)
        groups = group_layers(self._compressor, layers, step)
        parts = total.split([group.layer.numel for group in groups])
        return bundled(
            [
                cast(PerLayer, group.compressor).encode_bucket(
                    split(part, group.layers), None, None, group.layers, step
                )
                for group, part in zip(groups, parts, strict=True)
            ]
        )
