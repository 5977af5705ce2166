"""Base classes of optimizers that encode what they exchange themselves, and keep their state as flat vectors."""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from bench.optimizers.base import Optimizer
from collectives.base import Collective
from collectives.options import Incompatible
from collectives.payloads import Payload
from collectives.transport.base import SingleRank, Transport
from compressors.base import Compressor
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.exchange.report import EncodedLayer, StepReport


class FlatOptimizer(torch.optim.Optimizer, abc.ABC):
    """A torch optimizer whose state consists of vectors over all parameters, laid end to end in fp32.

    Args:
        parameters: the parameters to update; one without a gradient counts as if its gradient were zero, because all
            ranks must exchange the same tensors.
        lr: the learning rate.
        channel: carries what ranks exchange; None for a process that trains alone.

    Attributes:
        parameters: the parameters, in the order of the channel's layers.
        numels: number of elements of each parameter.
        channel, transport: the channel and its transport.
        memory: the vectors that a checkpoint must hold, by name.
        counts: the numbers that a checkpoint must hold, by name.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, channel: CompressedCommunicator | None = None
    ) -> None:
        self.parameters = list(parameters)
        super().__init__(self.parameters, {"lr": lr})
        self.numels = [parameter.numel() for parameter in self.parameters]
        self.channel = channel
        self.transport: Transport = SingleRank() if channel is None else channel.transport
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
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.descend(torch.cat([gradient.reshape(-1).float() for gradient in gradients]), self.param_groups[0]["lr"])
        return loss

    def zeros(self) -> torch.Tensor:
        """Return a vector of zeros, fp32 [elements of all parameters]."""
        return torch.zeros(sum(self.numels), device=self.parameters[0].device)

    def weights(self) -> torch.Tensor:
        """Return a copy of all parameters as one vector, fp32."""
        return torch.cat([parameter.detach().reshape(-1).float() for parameter in self.parameters])

    def set_weights(self, weights: torch.Tensor) -> None:
        """Overwrite all parameters with the elements of a vector."""
        for parameter, part in zip(self.parameters, weights.split(self.numels), strict=True):
            parameter.copy_(part.view(parameter.shape))

    def add_to_weights(self, update: torch.Tensor, factor: float) -> None:
        """Add factor * update, a vector over all parameters, to the parameters."""
        for parameter, part in zip(self.parameters, update.split(self.numels), strict=True):
            parameter.add_(part.view(parameter.shape), alpha=factor)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[StepReport]:
        """Time a `with` block as exchange time of the channel, if there is one; the block may add to the report."""
        with contextlib.nullcontext(StepReport()) if self.channel is None else self.channel.exchanging() as report:
            yield report

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
            for layer, payload in zip(self.channel.layers if self.channel else [], payloads, strict=False)
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


@dataclasses.dataclass(kw_only=True)
class OwnPayloads(Optimizer):
    """Base of the optimizers that encode what they exchange themselves, and so take no compressor."""

    clips_own_gradients: ClassVar[bool] = True

    @property
    @override
    def keeps_gradients(self) -> bool:
        return True

    @override
    def check_compatible(self, compressor: Compressor, collective: Collective) -> None:
        if compressor.component_name != "none":
            raise Incompatible(
                f"{self.component_name} encodes what it sends itself, so {compressor.component_name} would have "
                "nothing to compress; use compressor none"
            )

    @abc.abstractmethod
    def build_flat(
        self, parameters: Iterable[nn.Parameter], lr: float, channel: CompressedCommunicator | None
    ) -> FlatOptimizer:
        """Build the torch optimizer of these parameters, which exchanges through `channel` unless that is None."""

    @override
    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return self.build_flat(parameters, lr, None)

    @override
    def bind(self, model: nn.Module, lr: float, channel: CompressedCommunicator | None = None) -> torch.optim.Optimizer:
        return self.build_flat([p for p in model.parameters() if p.requires_grad], lr, channel)
