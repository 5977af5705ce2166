"""Base class of optimizers that encode what they exchange themselves, and keep their state as flat vectors."""

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from collectives.base import Collective
from collectives.options import Incompatible
from collectives.payloads import Payload
from compressors.base import Compressor
from compressors.layer import layers_of
from gradwire.exchange.communicator import CompressedCommunicator, set_parts_
from gradwire.exchange.report import EncodedLayer, StepReport
from gradwire.optim.base import BoundOptimizer, Trained, network_of
from gradwire.optim.matrices import weight_of


class FlatOptimizer(BoundOptimizer):
    """A torch optimizer whose state consists of vectors over all parameters, laid end to end in fp32.

    Args:
        model: the network, the same on all ranks, or its parameters; one without a gradient counts as if its gradient
            were zero, because all ranks must exchange the same tensors.
        lr: the learning rate.
        check: raises `Incompatible` if the collective cannot carry what ranks send.
        collective: sums what ranks send; a spec or an instance.
        group: process group of the ranks; None for the default group.
        timeout_s: longest wait for any one message, in seconds.
        communicator: takes the place of the three before; the caller closes it.

    Attributes:
        parameters: the parameters, in the order of the communicator's layers.
        numels: number of elements of each parameter.
        transport: the communicator's transport.
        memory: the vectors that a checkpoint must hold, by name.
        counts: the numbers that a checkpoint must hold, by name.
    """

    communicator: CompressedCommunicator
    keeps_gradients = True

    def __init__(
        self,
        model: Trained,
        lr: float,
        check: Callable[[Compressor, Collective], None],
        collective: Collective | str,
        group: dist.ProcessGroup | None,
        timeout_s: float,
        communicator: CompressedCommunicator | None,
    ) -> None:
        network = network_of(model)
        self.parameters = [weight_of(layer) for layer in layers_of(network)]
        super().__init__(self.parameters, {"lr": lr})
        self.numels = [parameter.numel() for parameter in self.parameters]
        self.communicator = communicator or self.open_communicator(network, "none", collective, group, timeout_s, check)
        self.transport = self.communicator.transport
        self.memory: dict[str, torch.Tensor] = {}
        self.counts: dict[str, float] = {}

    @abc.abstractmethod
    def descend(self, gradient: torch.Tensor, lr: float) -> None:
        """Exchange what the method exchanges, and update the parameters; every rank must call this method.

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

    def set_weights(self, weights: torch.Tensor) -> None:
        """Overwrite all parameters with the elements of a vector."""
        set_parts_(self.parameters, weights)

    def exchanging(self) -> contextlib.AbstractContextManager[StepReport]:
        """Time a `with` block as exchange time of the communicator; the block may add to the report."""
        return self.communicator.exchanging()

    def encoded(self, payloads: Sequence[Payload], seconds: float) -> list[EncodedLayer]:
        """Return the entries of a step report for payloads, one per parameter, that took `seconds` to encode."""
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
    """Add factor * update, [elements of all tensors], to tensors that `update` holds laid end to end."""
    for tensor, part in zip(tensors, update.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.add_(part.view(tensor.shape), alpha=factor)


def refuse_compressor(name: str, compressor: Compressor) -> None:
    """Check that an optimizer that encodes what it sends itself gets no compressor.

    Raises:
        Incompatible: it gets one.
    """
    if compressor.component_name != "none":
        raise Incompatible(
            f"{name} encodes what it sends itself, so {compressor.component_name} would have nothing to compress; use "
            "compressor none"
        )
