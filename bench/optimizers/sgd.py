"""SGD: stochastic gradient descent with heavy-ball or Nesterov momentum.

Source: Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep learning" (2013).
Differs: as in torch, the learning rate multiplies the velocity instead of entering it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt
from typing_extensions import Doc, override

from bench.optimizers.base import HandedOver, Optimizer
from collectives.options import OptionError, PositiveOrZero


@dataclasses.dataclass(kw_only=True)
class Sgd(Optimizer):
    """Build torch.optim.SGD.

    Raises:
        OptionError: "sgd: nesterov=true needs momentum above 0; leave one of them out".
    """

    default_lr: ClassVar[float] = 0.02

    momentum: Annotated[float, Ge(0), Lt(1), Doc("share of the last velocity that is kept")] = 0.9
    nesterov: Annotated[bool, Doc("look ahead along the velocity before stepping")] = False
    weight_decay: Annotated[PositiveOrZero, Doc("L2 penalty, added to the gradient")] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise OptionError(f"{self.component_name}: nesterov=true needs momentum above 0; leave one of them out")

    def hand_over_momentum(self) -> HandedOver:
        """Return SGD without momentum, in which only the weight decay keeps a velocity."""
        remaining = SgdOfVelocities(**{name: getattr(self, name) for name in self.option_names()})
        return HandedOver(optimizer=remaining, coefficient=self.momentum, nesterov=self.nesterov)

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=True,  # one pass over memory
        )


@dataclasses.dataclass(kw_only=True)
class SgdOfVelocities(Sgd):
    """SGD on gradients that already include momentum; only the weight decay needs a velocity here.

    Without that velocity the decay would be weaker by the factor 1 - momentum.

    Source: the optimizer in the repository of the method's authors (synxlin/deep-gradient-compression,
    dgc/optim/sgd.py).
    """

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=lr, fused=True)
        if self.weight_decay:
            optimizer.register_step_pre_hook(lambda optimizer, *_: self._add_decay(optimizer))
        return optimizer

    @torch.no_grad()
    def _add_decay(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                decay = parameter * self.weight_decay
                velocity = optimizer.state[parameter].setdefault("decay_velocity", torch.zeros_like(parameter))
                velocity.mul_(self.momentum).add_(decay)
                parameter.grad.add_(decay.add_(velocity, alpha=self.momentum) if self.nesterov else velocity)
