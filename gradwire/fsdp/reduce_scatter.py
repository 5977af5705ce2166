"""`attach_reduce_scatter`: compress the reduce-scatter of a model that FSDP2 (`fully_shard`) shards.

FSDP2 cuts a unit's gradients into one row per rank, and rank j needs the mean of all ranks' rows j. Each rank encodes
each row separately and sends row j to rank j (an all-to-all). Every rank decodes and averages the rows that it
receives.

Bytes: a rank sends every row once, except its own row. A training step also gathers the parameters, uncompressed. If
FSDP2 gathers them twice per step, in the gradients' dtype, compression can save at most a third of the step's bytes.
"""

import dataclasses
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from collectives.allreduce import Allgather
from collectives.payloads.base import Payload, unpack
from collectives.payloads.bundle import UnreducedSum
from collectives.schedule.rounds import leaves
from collectives.transport.base import Transport
from collectives.transport.messages import bound_nbytes, pack
from compressors.base import Compressor, MultiRound, PerLayer
from compressors.layer import Layer
from gradwire.components import build_components, check_momentum
from gradwire.exchange.communicator import HookSettings
from gradwire.exchange.marks import mark
from gradwire.exchange.reducer import PerLayerReducer
from gradwire.exchange.report import Bucket
from gradwire.fsdp.attach import FsdpHook, checked_units
from gradwire.fsdp.units import Unit
from gradwire.step_guard import Nonfinite


def attach_reduce_scatter(
    model: nn.Module,
    compressor: Compressor | str,
    *,
    seed: int = 0,
    momentum: float | None = None,
    nesterov: bool = False,
    nonfinite: Nonfinite = "skip",
    timeout_s: float = 300.0,
) -> "ReduceScatterHook":
    """Compress the gradients that the ranks of a model in FSDP2 send each other, from the next `backward` on.

    Every rank must call this function. The compressed exchange replaces FSDP2's reduce-scatter. With error feedback,
    every rank keeps a residual and the memory for the next residual, each of the size of the whole model in fp32.

    The compressor treats each rank's piece of each parameter as a layer, as `attach_fsdp` does.

    Args:
        model: a model after `fully_shard` with a mesh of one dimension; compiled or not.
        compressor: an instance, or a spec such as "qsgd:bits=8"; must be a compressor that sends payloads per layer.
        seed: seed of the compressor's own random numbers, the same on every rank.
        momentum: coefficient in [0, 1), for compressors that apply the momentum themselves; set the optimizer's own
            momentum to 0 then.
        nesterov: apply Nesterov momentum, as the optimizer would.
        nonfinite: what to do about NaN or infinity: "skip" the step on all ranks, "raise", or "zero" the elements.
        timeout_s: longest wait for any one message, in seconds.

    Raises:
        ValueError: the model is not in FSDP2, is sharded over a mesh of several dimensions (native HSDP), or has a
            trainable parameter that is not sharded; the compressor does not work in a reduce-scatter; momentum is
            missing, or given but not used.
        OptionError: a spec names an unknown component, or has a wrong option.
    """
    # Only used to check the compressor. Allgather fits, because here, too, every rank decodes payloads of all ranks.
    collective = Allgather()
    compressor, _ = build_components(compressor, collective)
    if isinstance(compressor, MultiRound) or compressor.traits.needs_all_ranks:
        raise ValueError(
            f"{compressor.component_name} needs all ranks while it encodes, and in a reduce-scatter each row has "
            "another receiver; use another compressor, or leave out its shared scale"
        )
    model = getattr(model, "_orig_mod", model)
    units, mesh = checked_units(model, compressor, collective)
    assert isinstance(compressor, PerLayer)
    if mesh.size() == 1:
        raise ValueError("the model is not divided among several ranks, so FSDP2 reduces nothing; shard it over more")
    check_momentum(compressor, momentum, nesterov=nesterov)
    reducer = PerLayerReducer(compressor, momentum=momentum or 0.0, nesterov=nesterov)
    settings = HookSettings(seed=seed, nonfinite=nonfinite, timeout_s=timeout_s)
    return ReduceScatterHook(model, units, mesh, reducer, collective, settings)


class ReduceScatterHook(FsdpHook):
    """Replaces FSDP2's reduce-scatter with a compressed one; `attach_reduce_scatter` creates it.

    `layers` contains all ranks' pieces of every trainable parameter, and the reducer keeps a residual for each piece.
    """

    _skips_sending = "model.set_requires_gradient_sync(False)"
    reducer: PerLayerReducer

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        mesh: DeviceMesh,
        reducer: PerLayerReducer,
        collective: Allgather,
        settings: HookSettings,
    ) -> None:
        num_ids = 1 + max((layer.id for unit in units for layer in unit.layers), default=0)
        num_ranks = mesh.size()
        self._rows = {
            unit.name: [[_of_rank(layer, rank, num_ids) for layer in unit.layers] for rank in range(num_ranks)]
            for unit in units
        }
        layers = [layer for rows in self._rows.values() for row in rows for layer in row]
        super().__init__(model, units, layers, mesh, mesh.get_group(), reducer, collective, settings)
        for unit in units:
            unit.module.set_custom_reduce_scatter(_CompressedReduceScatter(self, unit))  # type: ignore[arg-type]

    def reduce(self, unit: Unit, shard: torch.Tensor, gradients: torch.Tensor) -> None:
        """Average over ranks the row of a unit's gradients that belongs to this rank, and write the mean to `shard`.

        Args:
            unit: the unit.
            shard: floating [unit.numel], written.
            gradients: this rank's gradients, floating [ranks * unit.numel], one row per rank; may be overwritten.

        Raises:
            RuntimeError: the hook is closed, or FSDP2 reduces a buffer that is not expected now.
            TransportError: a rank was lost or did not answer in time.
        """
        self._check_call(unit, shard.numel())
        self._begin_unit(unit)
        self.guard.screen_([gradients])
        own, sizes = self.transport.rank, [layer.numel for layer in unit.layers]
        with self.exchanging() as report:
            messages = []
            for rank, row in enumerate(gradients.split(unit.numel)):
                bucket = Bucket(layers=self._rows[unit.name][rank], gradients=list(row.split(sizes)), step=self._step)
                messages.append(cast(Payload, self.reducer.message(bucket, self.transport)))
                report.encode_s = (report.encode_s or 0.0) + bucket.encode_s
                report.encoded += bucket.encoded if rank != own else []
            arriving = Bucket(layers=self._rows[unit.name][own], gradients=list(shard.split(sizes)), step=self._step)
            with mark("exchange"):
                parts = _all_to_all(messages, self.transport)
            self.reducer.finish_bucket(UnreducedSum(parts), arriving)
            self.reducer.memory.buffers.end_step()
            report.encode_s = (report.encode_s or 0.0) + arriving.encode_s


class _CompressedReduceScatter:
    """The reduce-scatter of one unit, as FSDP2 calls it (its `ReduceScatter` is a private class)."""

    def __init__(self, hook: ReduceScatterHook, unit: Unit) -> None:
        self._hook, self._unit = hook, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: object
    ) -> None:
        self._hook.reduce(self._unit, output_tensor, input_tensor)
        if op == dist.ReduceOp.SUM:  # FSDP2 divides then
            output_tensor.mul_(group.size())
        elif op != dist.ReduceOp.AVG:
            raise RuntimeError(f"FSDP2 asks for {op}; leave out set_reduce_scatter_divide_factor")


def _of_rank(layer: Layer, rank: int, num_ids: int) -> Layer:
    # one rank's piece of a parameter as a separate layer, with its own residual
    return dataclasses.replace(layer, id=layer.id + rank * num_ids, name=f"{layer.name}, shard {rank}")


def _all_to_all(messages: Sequence[Payload], transport: Transport) -> list[Payload]:
    """Send message j to rank j; return the messages from all ranks to this rank, in rank order; all have equal size."""
    to = [(transport.rank + distance) % transport.world_size for distance in range(1, transport.world_size)]
    sources = to[::-1]
    bound = bound_nbytes(messages[0].numel, len(leaves(messages[0])))
    sends = [(pack(messages[rank], transport, bound), rank) for rank in to]
    wait = transport.send_receive(sends, [(bound, rank) for rank in sources])
    received = dict(zip(sources, map(unpack, wait()), strict=True))
    return [received.get(rank, messages[rank]) for rank in range(transport.world_size)]
