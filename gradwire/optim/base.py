"""`BoundOptimizer`: a torch optimizer that may exchange something itself, in `bench` and in a script of your own."""

import abc
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from collectives.base import Collective
from collectives.transport.base import SingleRank
from compressors.base import Compressor, MultiRound, PerLayer
from compressors.layer import layers_of
from gradwire.components import build_components
from gradwire.exchange.communicator import CompressedCommunicator, copy_from_first_rank_, own_transport
from gradwire.exchange.reducers import reducer_for

# A model, or its parameters, with or without names.
Trained = nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


class BoundOptimizer(torch.optim.Optimizer, abc.ABC):
    """A torch optimizer, with what a training loop may ask of one that exchanges something itself.

    A communicator that is given belongs to the caller, who starts and finishes its steps. With one that the optimizer
    opened, `step` does so. If it takes each rank's own gradients, it changes nothing on any rank in a step in which a
    gradient of some rank is not finite.

    Attributes:
        communicator: carries what ranks exchange in `step`; None if they exchange nothing.
        keeps_gradients: True if `step` takes this rank's own gradients, not their mean over ranks.
    """

    communicator: CompressedCommunicator | None = None
    keeps_gradients: bool = False
    _opened: CompressedCommunicator | None = None

    @abc.abstractmethod
    def update(self) -> None:
        """Exchange what the method exchanges, and update the parameters; every rank must call this method."""

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
        """Return the bytes of what this rank has not sent yet."""
        return 0

    def show_shared(self) -> None:
        """Set the parameters to those after the last exchange, which all ranks share, to evaluate or save them."""

    def show_own(self) -> None:
        """Set the parameters to this rank's own, with its steps since the last exchange, to train on."""

    def go_to(self, step: int) -> None:
        """Go on as if `step` steps were done, to measure times; the state may not be that of a training."""

    def close(self) -> None:
        """Close the communicator that this optimizer opened, if there is one; every rank must call this method."""
        if self._opened is not None:
            self._opened.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state, which may differ between ranks: save that of every rank."""
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
        check: Callable[[Compressor, Collective], None] = lambda *_: None,
    ) -> CompressedCommunicator:
        """Return a new communicator, which `close` closes; every rank must call this method.

        If the optimizer keeps gradients, the network gets the parameters and buffers of the group's first rank.

        Args:
            network: the network, whose trainable parameters are the communicator's layers.
            compressor: an instance, or a spec such as "bf16".
            collective: an instance, or a spec such as "ring".
            group: process group of the ranks; None for the default group, or for one rank if there is no group.
            timeout_s: longest wait for any one message, in seconds.
            check: raises `Incompatible` if the optimizer does not work with the compressor and the collective.

        Raises:
            OptionError: a spec names no component, or components do not work together.
            ValueError: the network is in DDP, which would average gradients as well; the compressor is a hook of DDP or
                applies momentum itself.
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
        check(compressor, collective)
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
        """Begin a step, and return True if all ranks can make it."""
        guard = communicator.guard
        communicator.start_step(communicator.step_of(guard.index, None, seed=0))
        guard.index += 1
        if not self.keeps_gradients:
            return True
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        guard.screen_([parameter.grad for parameter in parameters if parameter.grad is not None])
        return not guard.start_vote(communicator.start_on_any_rank)()


def network_of(trained: Trained) -> nn.Module:
    """Return the model, or a module with the parameters if only these are given.

    Raises:
        ValueError: it is neither a model nor parameters, for example groups of parameters.
    """
    if isinstance(trained, nn.Module):
        return trained
    parameters = [each[1] if isinstance(each, tuple) else each for each in trained]
    if not all(isinstance(parameter, nn.Parameter) for parameter in parameters):
        raise ValueError("groups of parameters with options of their own are not possible; give the model")
    return nn.ParameterList(parameters)
