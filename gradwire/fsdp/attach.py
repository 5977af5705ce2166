"""`attach_fsdp`: exchange compressed gradients between replicas of a model that FSDP2 (`fully_shard`) shards.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    hook = attach_fsdp(model, "group_topk:ratio=0.01", "allgather", replicas=mesh["replica"].get_group())

FSDP2 shards the model inside each replica and does not know the other replicas. After each reduce-scatter, FSDP2 calls
a hook with this rank's shard of one unit's gradients. The hook replaces the shard with the mean over replicas before
backward continues.
"""

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from collectives.base import Collective
from collectives.transport.process_group import gather_json
from compressors.base import Compressor, DdpHook
from compressors.layer import Layer, layers_of, sparse_gradients
from gradwire.components import build_components, check_momentum, check_types
from gradwire.exchange.communicator import CompressedCommunicator, HookSettings, own_transport
from gradwire.exchange.reducer import Reducer, reducer_for
from gradwire.exchange.report import Bucket, StepReport
from gradwire.fsdp.units import Unit, units_of
from gradwire.step_guard import Nonfinite


def attach_fsdp(
    model: nn.Module,
    compressor: Compressor | str,
    collective: Collective | str | None = None,
    *,
    replicas: dist.ProcessGroup,
    seed: int = 0,
    momentum: float | None = None,
    nesterov: bool = False,
    nonfinite: Nonfinite = "skip",
    timeout_s: float = 300.0,
) -> "ShardHook":
    """Exchange the gradients of `model` between its replicas, from the next `backward` on.

    Every rank must call this function. It copies the weights and buffers of the first replica to the other replicas,
    and sets FSDP2's gradient divide factor so that every `.grad` becomes the mean over all ranks of all replicas.

    The compressor treats this rank's piece of each parameter as a layer. The size of a piece along the dimension that
    FSDP2 shards is the parameter's size divided by the number of shards, rounded up.

    Args:
        model: a model to which `fully_shard` was applied with a mesh of shards only; compiled or not.
        compressor: an instance, or a spec such as "group_topk:ratio=0.01".
        collective: an instance, or a spec such as "ring"; sums the payloads. None: the compressor's default.
        replicas: the ranks that hold the same shard as this rank, one of each replica.
        seed: seed of the compressor's own random numbers, the same on every rank.
        momentum: coefficient in [0, 1), for compressors that apply the momentum themselves; set the optimizer's own
            momentum to 0 then.
        nesterov: apply Nesterov momentum, as the optimizer would.
        nonfinite: what to do about NaN or infinity: "skip" the step on all ranks of all replicas, "raise", or "zero"
            the elements.
        timeout_s: longest wait for any one message between replicas, in seconds.

    Raises:
        ValueError: the model is not in FSDP2, is sharded over a mesh of several dimensions (native HSDP), or has a
            trainable parameter that is not sharded; `replicas` does not fit the shards; the compressor does not fit the
            collective or FSDP2; momentum is missing, or given but not used.
        OptionError: a spec names an unknown component, or has a wrong option.
    """
    compressor, collective = build_components(compressor, collective)
    model = getattr(model, "_orig_mod", model)
    units, mesh = checked_units(model, compressor, collective)
    check_momentum(compressor, momentum, nesterov=nesterov)
    _check_replicas(units, mesh, replicas)
    _copy_weights(model, replicas)
    reducer = reducer_for(compressor, momentum=momentum or 0.0, nesterov=nesterov)
    settings = HookSettings(seed=seed, nonfinite=nonfinite, timeout_s=timeout_s)
    return ShardHook(model, units, mesh, replicas, reducer, collective, settings)


def checked_units(model: nn.Module, compressor: Compressor, collective: Collective) -> tuple[list[Unit], DeviceMesh]:
    """Return the units of a model in FSDP2, and the mesh over which they are sharded.

    Raises:
        ValueError: the compressor does not fit FSDP2, the collective or the model, or the model is not supported.
    """
    name = compressor.component_name
    if isinstance(compressor, DdpHook):
        raise ValueError(f"{name} works through DDP's communication hook, which FSDP2 lacks; use another compressor")
    units, mesh = units_of(model)
    if any(unit.module in _ATTACHED for unit in units):
        raise ValueError("this model has a hook already; close it before you attach another one")
    if reason := sparse_gradients(model):
        raise ValueError(reason)
    if compressor.traits.one_bucket and len(units) > 1:
        raise ValueError(
            f"{name} wants the whole model as one bucket with these options, and fully_shard made {len(units)} units; "
            "use scope=bucket"
        )
    check_types(layers_of(model), compressor)
    compressor.check_compatible(collective, [layer for unit in units for layer in unit.layers])
    return units, mesh


_ATTACHED: weakref.WeakSet[FSDPModule] = weakref.WeakSet()  # modules in fully_shard whose hook is open


class FsdpHook(CompressedCommunicator):
    """Base of the hooks that exchange compressed gradients of a model in FSDP2, one unit at a time inside `backward`.

    These exchanges compute new state, such as residuals. `step_ok` makes this state current, on all ranks or on none.

    Args:
        model: the model.
        units: the model's units.
        layers: the tensors that are compressed.
        mesh: the ranks over which the model is sharded.
        group: the ranks that exchange compressed gradients.
        reducer: the compressor with this rank's state.
        collective: sums payloads.
        settings: settings that do not depend on the compressor or the collective.

    Attributes:
        layers, reducer: the arguments.
        collective: the collective, bound to the transport.
        transport: connects the ranks that exchange compressed gradients.
    """

    _skips_sending: ClassVar[str]  # the call that skips sending in a micro-step

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        layers: Sequence[Layer],
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        reducer: Reducer,
        collective: Collective,
        settings: HookSettings,
    ) -> None:
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        transport = own_transport(device, settings.timeout_s, group)
        super().__init__(layers, reducer, collective, transport, settings.nonfinite)
        self._model, self._units, self._mesh = model, units, mesh
        self._settings = settings
        self.guard.attach(model, self._why_not_exchanged, reducer.compressor, self.transport.rank)
        self._exchanged: set[str] = set()  # names of units, since the last `finish_step`
        _ATTACHED.update(unit.module for unit in units)

    def step_ok(self) -> bool:
        """Return True if the caller must call `optimizer.step()`; False if a gradient of any rank was not finite.

        Call this method once per step, on every rank.

        Raises:
            TransportError: a rank was lost or did not answer in time.
            NonFiniteGradient: a gradient was not finite, and `nonfinite` is "raise".
            RuntimeError: FSDP2 has not reduced all units since the last call, so the ranks' models would diverge.
        """
        return not self.finish_step().skipped

    @override
    def finish_step(self) -> StepReport:
        """Return the report of the exchange in the last `backward`; raises the same errors as `step_ok`."""
        if missing := [unit.name for unit in self._units if unit.layers and unit.name not in self._exchanged]:
            raise RuntimeError(self._why_missing(missing))
        self.guard.check()
        self._exchanged.clear()
        self.guard.index += 1
        self.conclude(is_nonfinite=self._settings.nonfinite != "zero" and self._is_nonfinite_anywhere())
        return self._report

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for resuming bit for bit; every rank must save its own, because ranks differ.

        Gradients of micro-steps that were not exchanged yet are not part of the state.
        """
        return {"hook": type(self).__name__, "shard": self._shard, **super().state_dict()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the whole state with one that `state_dict` returned; load the model's weights first.

        Raises:
            ValueError: the state belongs to another shard, or another kind of hook.
        """
        if state["hook"] != type(self).__name__:
            raise ValueError(f"this state is that of a {state['hook']}, and this hook is a {type(self).__name__}")
        if [*state["shard"]] != self._shard:
            (of, n), (own, now) = state["shard"], self._shard
            raise ValueError(
                f"this state belongs to shard {of} of {n}, and this rank holds shard {own} of {now}; "
                "load the file of the same rank, with the same number of shards"
            )
        super().load_state_dict(state)

    @override
    def close(self) -> None:
        """Release the process group and the collective; every rank must call this method.

        Afterwards `backward` through this model raises an error, until a hook is attached again. Later calls do
        nothing.
        """
        if not self.guard.closed:
            _ATTACHED.difference_update(unit.module for unit in self._units)
            super().close()

    @property
    def _shard(self) -> list[int]:
        # this rank's shard, and the number of shards
        return [self._mesh.get_local_rank(), self._mesh.size()]

    def _begin_unit(self, unit: Unit) -> None:
        # the first unit that is exchanged in a step begins the step
        if not self._exchanged:
            self.start_step(self.step_of(self.guard.index, self.guard.epoch, self._settings.seed))
        self._exchanged.add(unit.name)

    def _check_call(self, unit: Unit, numel: int) -> None:
        """Raise RuntimeError if the hook is closed, or FSDP2 reduces a unit twice in a step or with another `numel`."""
        if self.guard.closed:
            raise RuntimeError("the hook of this model is closed; attach one again")
        if numel != unit.numel:
            raise RuntimeError(
                f"FSDP2 reduced {numel} elements of {unit.name} instead of {unit.numel}, because a parameter got no "
                "gradient, or was frozen or unfrozen after the hook was attached; call "
                "model.set_reduce_scatter_unused_params(True), and freeze first"
            )
        if unit.name in self._exchanged:
            raise RuntimeError(
                f"{unit.name} was reduced twice since the last step_ok(); call step_ok() once per step, and "
                f"{self._skips_sending} before the backward of all micro-steps but the last"
            )

    def _is_nonfinite_anywhere(self) -> bool:
        return self.guard.start_vote(self.start_on_any_rank)()

    def _why_not_exchanged(self) -> str | None:
        """Return a message about a parameter whose gradient is not exchanged; None if there is no such parameter."""
        try:
            now, _ = units_of(self._model)
        except ValueError as error:
            return str(error)  # a parameter that is not sharded
        changed = sorted(name for name, _, _ in _places(now) ^ _places(self._units))
        if not changed:
            return None
        return (
            f"{changed[0]} was added, removed, replaced, frozen or unfrozen after the hook was attached; do that "
            "first, or close() the hook and attach one again"
        )

    def _why_missing(self, missing: Sequence[str]) -> str:
        if self.guard.closed:
            return "the hook of this model is closed; attach one again"
        if self._exchanged:
            return (
                f"backward() did not reach {missing[0]}, and every module in fully_shard must take part in every step; "
                "shard it together with one that always does"
            )
        return (
            "no gradient was exchanged since the last step_ok(); call it once per step, after a backward() that sends"
        )


class ShardHook(FsdpHook):
    """All-reduce hook of FSDP2 that exchanges gradient shards between replicas; `attach_fsdp` creates it.

    `layers` are this rank's piece of every trainable parameter, and the reducer keeps the residuals of these pieces.
    """

    _skips_sending = "hook.set_requires_all_reduce(False)"

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        reducer: Reducer,
        collective: Collective,
        settings: HookSettings,
    ) -> None:
        layers = [layer for unit in units for layer in unit.layers]
        super().__init__(model, units, layers, mesh, group, reducer, collective, settings)
        self._requires_all_reduce = True
        self._sums: dict[str, torch.Tensor] = {}  # by unit: gradient shards of micro-steps that were not exchanged
        for unit in units:
            # The sum, because gloo's average is silently a sum; `_exchange` divides.
            unit.module.set_gradient_divide_factor(1.0)
            unit.module.set_force_sum_reduction_for_comms(True)
            unit.module.set_all_reduce_hook(functools.partial(self._exchange, unit))

    def set_requires_all_reduce(self, requires_all_reduce: bool) -> None:
        """Set whether the next `backward` exchanges gradients between replicas, like FSDP2's own method in native HSDP.

        With False, gradients are still reduced among the shards. The hook adds these gradients up, and every `.grad` is
        0. The next `backward` with True exchanges the sum; call `step_ok` only after that `backward`.

        FSDP2's own `set_requires_gradient_sync(False)` sends nothing at all, and keeps whole gradients on every rank.
        """
        self._requires_all_reduce = requires_all_reduce

    @torch.no_grad()
    def _exchange(self, unit: Unit, shard: torch.Tensor) -> None:
        """Replace this rank's shard of a unit's gradients, summed over shards, with the mean over all ranks.

        FSDP2 calls this method during backward.

        Args:
            unit: the unit.
            shard: floating [unit.numel].
        """
        self._check_call(unit, shard.numel())
        if shard.is_cuda:
            shard.record_stream(torch.cuda.current_stream())  # FSDP2 allocated it in another stream
        if (earlier := self._sums.pop(unit.name, None)) is not None:
            shard.add_(earlier)
        if not self._requires_all_reduce:
            self._sums[unit.name] = shard.clone()
            shard.zero_()
            return
        self._begin_unit(unit)
        parts = list(shard.div_(self._mesh.size()).split([layer.numel for layer in unit.layers]))
        with self.exchanging() as report:
            bucket = Bucket(
                layers=unit.layers, gradients=parts, step=self._step, screen_=self.guard.screen_, buffer=shard
            )
            self.reducer.reduce(bucket, self.collective.sum, self.transport)
            report.encoded, report.encode_s = bucket.encoded, bucket.encode_s

    @override
    def _is_nonfinite_anywhere(self) -> bool:
        among_replicas = super()._is_nonfinite_anywhere()
        flag = torch.tensor([among_replicas], dtype=torch.float32, device=self.transport.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._mesh.get_group())
        return bool(flag)


def _places(units: Sequence[Unit]) -> set[tuple[str, tuple[int, ...], FSDPModule]]:
    return {(layer.name, layer.shape, unit.module) for unit in units for layer in unit.layers}


def _check_replicas(units: Sequence[Unit], mesh: DeviceMesh, replicas: dist.ProcessGroup) -> None:
    advice = "with a mesh of (replica, shard) pass replicas=mesh['replica'].get_group()"
    if dist.get_rank(replicas) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in its group of replicas; {advice}")
    shapes = [list(layer.shape) for unit in units for layer in unit.layers]
    own = [dist.get_rank(), mesh.get_local_rank(), mesh.size(), shapes]
    found = gather_json(own, replicas)
    for (one, *held), (other, *holds) in itertools.pairwise(found):
        if held[:2] != holds[:2]:
            raise ValueError(
                f"rank {one} holds shard {held[0]} of {held[1]} and rank {other} shard {holds[0]} of {holds[1]}, and "
                f"replicas must join ranks that hold the same shard; {advice}"
            )
        if held != holds:
            raise ValueError(f"ranks {one} and {other} have models of different shapes; build the same on all ranks")


@torch.no_grad()
def _copy_weights(model: nn.Module, replicas: dist.ProcessGroup) -> None:
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel():
            dist.broadcast(local.detach(), group=replicas, group_src=0)
