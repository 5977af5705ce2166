"""`BoundOptimizer`: a torch optimizer that may itself exchange data between ranks, in `bench` or in your own script.

`FlatOptimizer` is the base of the optimizers that encode their messages themselves and keep their state as flat
vectors.
"""

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from collectives.base import Collective
from collectives.options import incompatibility
from collectives.payloads import Dense, Payload
from collectives.refusals import Refusal, refuse
from collectives.transport.base import SingleRank
from compressors.base import Compressor, MultiRound, PerLayer
from compressors.floats import NoCompression
from compressors.layer import Layer, layers_of
from gradwire.components import build_components
from gradwire.exchange.communicator import (
    CompressedCommunicator,
    copy_from_first_rank_,
    own_transport,
)
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import EncodedLayer

# A model, or its parameters, with or without names.
Trained = nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


class BoundOptimizer(torch.optim.Optimizer, abc.ABC):
    """A torch optimizer that may itself exchange data, with the methods that a training loop then needs.

    If the caller gives a communicator, the caller also starts and finishes the communicator's steps. If the optimizer
    opened the communicator, `step` starts and finishes them. If the optimizer takes each rank's own gradients and the
    gradient of any rank is not finite, the step changes nothing on any rank.

    Attributes:
        communicator: sends and receives what ranks exchange in `step`; None if ranks exchange nothing.
        keeps_gradients: True if `step` takes this rank's own gradients, not their mean over ranks.
    """

    communicator: CompressedCommunicator | None = None
    keeps_gradients: bool = False
    _opened: CompressedCommunicator | None = None

    @abc.abstractmethod
    def update(self) -> None:
        """Exchange this optimizer's data, and update the parameters; every rank must call this method."""

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._opened is None:
            self.update()
        elif self._start_step(self._opened):
            self.update()
            self._opened.finish_step()
        return loss

    @property
    def residual_nbytes(self) -> int:
        """Return the bytes of memory for what this rank has not sent yet."""
        return 0

    def show_shared(self) -> None:
        """Set the parameters to their values after the last exchange, equal on all ranks, to evaluate or save them."""

    def show_own(self) -> None:
        """Set the parameters to this rank's own values, with its steps since the last exchange, to train on."""

    def go_to(self, step: int) -> None:
        """Continue as if `step` steps had been made, to measure times; the state may not be that of a real training."""

    def close(self) -> None:
        """Close the communicator that this optimizer opened, if there is one; every rank must call this method."""
        if self._opened is not None:
            self._opened.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state; every rank must save its own, because the state may differ between ranks."""
        if self._opened is None:
            return super().state_dict()
        return super().state_dict() | {"communicator": self._opened.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._opened is not None:
            self._opened.load_state_dict(state_dict["communicator"])

    def open_communicator(
        self,
        network: nn.Module,
        compressor: Compressor | str,
        collective: Collective | str,
        group: dist.ProcessGroup | None,
        timeout_s: float,
        table: Callable[[Compressor, Collective], Sequence[Refusal]] = lambda *_: (),
    ) -> CompressedCommunicator:
        """Return a new communicator, which `close` closes; every rank must call this method.

        If the optimizer keeps gradients, the network gets the parameters and buffers of the group's first rank.

        Args:
            network: the network, whose trainable parameters are the communicator's layers.
            compressor: an instance, or a spec such as "bf16".
            collective: an instance, or a spec such as "ring".
            group: process group of the ranks; None for the default group, or for one rank if there is no group.
            timeout_s: longest wait for any one message, in seconds.
            table: returns the reasons why components do not work with the optimizer, as refusals.

        Raises:
            OptionError: a spec names an unknown component, or components do not work together.
            ValueError: the network is in DDP, although the optimizer needs each rank's own gradients; the compressor is
                a hook of DDP or applies momentum itself.
        """
        compressor, collective = build_components(compressor, collective)
        if self.keeps_gradients and isinstance(network, DistributedDataParallel):
            raise ValueError(
                f"{type(self).__name__} takes each rank's own gradients, and DDP averages them; give it the network "
                "itself, and call that in place of the DDP model"
            )
        if not isinstance(compressor, PerLayer | MultiRound) or compressor.traits.owns_momentum:
            raise ValueError(
                f"{compressor.component_name} replaces DDP's hook or applies momentum itself, which only "
                "gradwire.attach offers; use another compressor, or add momentum_correction=false to it"
            )
        refuse(table, compressor, collective)
        layers = layers_of(network)
        compressor.check_compatible(collective, layers)
        device = cast(torch.Tensor, layers[0].weight).device
        has_group = dist.is_initialized()
        if has_group and self.keeps_gradients:
            copy_from_first_rank_([*network.parameters(), *network.buffers()], group)
        transport = own_transport(device, timeout_s, group) if has_group else SingleRank(device)
        self._opened = CompressedCommunicator(layers, reducer_for(compressor), collective, transport)
        return self._opened

    def _start_step(self, communicator: CompressedCommunicator) -> bool:
        """Begin a step; return False if all ranks must skip the step, because a rank's gradient is not finite."""
        guard = communicator.guard
        communicator.start_step(communicator.step_of(guard.index, None, seed=0))
        guard.index += 1
        if not self.keeps_gradients:
            return True
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        guard.screen_([parameter.grad for parameter in parameters if parameter.grad is not None])
        return not guard.start_vote(communicator.start_on_any_rank)()


def network_of(trained: Trained) -> nn.Module:
    """Return the model, or a module that contains the parameters if only parameters are given.

    Raises:
        ValueError: `trained` is neither a model nor parameters; for example, it is groups of parameters.
    """
    if isinstance(trained, nn.Module):
        return trained
    parameters = [each[1] if isinstance(each, tuple) else each for each in trained]
    if not all(isinstance(parameter, nn.Parameter) for parameter in parameters):
        raise ValueError("groups of parameters with options of their own are not possible; give the model")
    return nn.ParameterList(parameters)


def dense_refusal(what: str, collective: Collective, *, applies: bool = True) -> Refusal:
    """Return the refusal of a collective that cannot sum uncompressed tensors; `what` says who sends them."""
    reason = incompatibility(collective.check_compatible, Dense)
    return Refusal(applies and reason is not None, f"{what} (Dense payloads): {reason}", [{"collective": "native"}])


def weight_of(layer: Layer) -> nn.Parameter:
    """Return a layer's `weight`, as a parameter."""
    return cast(nn.Parameter, layer.weight)


class FlatOptimizer(BoundOptimizer):
    """A torch optimizer whose state consists of vectors over all parameters, laid end to end in fp32.

    Args:
        model: the network, the same on all ranks, or its parameters. A parameter without a gradient counts as if its
            gradient were zero, because all ranks must exchange the same tensors.
        lr: the learning rate.
        table: returns the reasons why components do not work with the optimizer, as refusals.
        collective: sums what ranks send; a spec or an instance.
        group: process group of the ranks; None for the default group.
        timeout_s: longest wait for any one message, in seconds.
        communicator: replaces `collective`, `group` and `timeout_s`; the caller closes it.

    Attributes:
        parameters: the trainable parameters, in the order of the communicator's layers.
        numels: number of elements of each parameter.
        transport: the communicator's transport.
        memory: the vectors that a checkpoint must contain, by name.
        counts: the numbers that a checkpoint must contain, by name.
    """

    communicator: CompressedCommunicator
    keeps_gradients = True

    def __init__(
        self,
        model: Trained,
        lr: float,
        table: Callable[[Compressor, Collective], Sequence[Refusal]],
        collective: Collective | str,
        group: dist.ProcessGroup | None,
        timeout_s: float,
        communicator: CompressedCommunicator | None,
    ) -> None:
        network = network_of(model)
        self.parameters = [weight_of(layer) for layer in layers_of(network)]
        super().__init__(self.parameters, {"lr": lr})
        self.numels = [parameter.numel() for parameter in self.parameters]
        self.communicator = communicator or self.open_communicator(network, "none", collective, group, timeout_s, table)
        self.transport = self.communicator.transport
        self.memory: dict[str, torch.Tensor] = {}
        self.counts: dict[str, float] = {}

    @abc.abstractmethod
    def descend(self, gradient: torch.Tensor, lr: float) -> None:
        """Exchange this optimizer's data, and update the parameters; every rank must call this method.

        Args:
            gradient: this rank's gradients, fp32 [elements of all parameters]; may be overwritten.
            lr: the learning rate of this step.
        """

    @override
    def update(self) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.descend(flat_of(gradients), self.param_groups[0]["lr"])

    def zeros(self) -> torch.Tensor:
        """Return a vector of zeros, fp32 [elements of all parameters]."""
        return torch.zeros(sum(self.numels), device=self.parameters[0].device)

    def encoded(self, payloads: Sequence[Payload], seconds: float) -> list[EncodedLayer]:
        """Return the entries of a step report for these payloads, one per parameter; encoding them took `seconds`."""
        return [
            EncodedLayer(
                layer=layer,
                payload=type(payload).__name__,
                nbytes=payload.nbytes,
                num_entries=payload.num_entries,
                seconds=seconds / len(payloads),
            )
            for layer, payload in zip(self.communicator.layers, payloads, strict=True)
        ]

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"memory": dict(self.memory), "counts": dict(self.counts)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        device = self.parameters[0].device
        self.memory = {name: saved.to(device, copy=True) for name, saved in state_dict["memory"].items()}
        self.counts = dict(state_dict["counts"])


def flat_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of tensors, of any shape, laid end to end: fp32 [elements of all tensors]."""
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])


def add_flat_(tensors: Sequence[torch.Tensor], update: torch.Tensor, factor: float) -> None:
    """Add factor * update to the tensors; `update` [elements of all tensors] lists their elements end to end."""
    for tensor, part in zip(tensors, update.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.add_(part.view(tensor.shape), alpha=factor)


def compressor_refusal(name: str, compressor: Compressor) -> Refusal:
    """Return a refusal of every compressor but `none`, for an optimizer that encodes its messages itself."""
    return Refusal(
        not isinstance(compressor, NoCompression),
        f"{name} encodes what it sends itself, so {compressor.component_name} would have nothing to compress",
        [{"compressor": "none"}],
    )
