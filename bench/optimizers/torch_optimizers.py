"""Optimizers of torch; the options have the same names and meaning as in torch."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt
from torch import nn
from typing_extensions import Doc, override

from bench.optimizers.base import Optimizer
from collectives.options import OptionError, Positive, PositiveOrZero
from gradwire.exchange.communicator import CompressedCommunicator


@dataclasses.dataclass(kw_only=True)
class TorchOptimizer(Optimizer):
    """Base of the components that build one of torch's optimizers; beta1 and beta2 become torch's `betas`.

    Attributes:
        implementation: arguments that select torch's fastest implementation.
    """

    implementation: ClassVar[Mapping[str, bool]] = {"fused": True}  # one pass over memory

    @override
    def bind(
        self, model: nn.Module, lr: float, communicator: CompressedCommunicator | None = None
    ) -> torch.optim.Optimizer:
        options = self.option_values()
        if "beta1" in options:
            options["betas"] = options.pop("beta1"), options.pop("beta2")
        return self.built(model.parameters(), lr=lr, **options, **self.implementation)


@dataclasses.dataclass(kw_only=True)
class Sgd(TorchOptimizer, name="sgd"):
    """SGD: stochastic gradient descent with heavy-ball or Nesterov momentum.

    Source: Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep learning"
    (2013).
    Differs: as in torch, the learning rate multiplies the momentum buffer, instead of each gradient that is added to
    it.

    Builds torch.optim.SGD.

    Raises:
        OptionError: "sgd: nesterov=true needs momentum above 0; leave one of them out".
    """

    default_lr: ClassVar[float] = 0.02
    built = torch.optim.SGD

    momentum: Annotated[float, Ge(0), Lt(1), Doc("share of the momentum buffer that a step keeps")] = 0.9
    nesterov: Annotated[bool, Doc("Nesterov momentum: look ahead along the momentum buffer before stepping")] = False
    weight_decay: Annotated[PositiveOrZero, Doc("L2 penalty, added to the gradient")] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise OptionError(f"{self.component_name}: nesterov=true needs momentum above 0; leave one of them out")

    @override
    def hand_over_momentum(self) -> tuple[Optimizer, float, bool]:
        return SgdAfterMomentum(**self.option_values()), self.momentum, self.nesterov


@dataclasses.dataclass(kw_only=True)
class SgdAfterMomentum(Sgd):
    """SGD for gradients to which the compressor has applied momentum; here only weight decay has a momentum buffer.

    Without this buffer, weight decay would be weaker by the factor 1 - momentum.

    Source: the optimizer in the repository of the authors of Deep Gradient Compression
    (synxlin/deep-gradient-compression, dgc/optim/sgd.py).
    """

    @override
    def bind(
        self, model: nn.Module, lr: float, communicator: CompressedCommunicator | None = None
    ) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, fused=True)
        if self.weight_decay:
            optimizer.register_step_pre_hook(lambda optimizer, *_: self._add_decay(optimizer))
        return optimizer

    @torch.no_grad()
    def _add_decay(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                decay = parameter * self.weight_decay
                buffer = optimizer.state[parameter].setdefault("decay_velocity", torch.zeros_like(parameter))
                buffer.mul_(self.momentum).add_(decay)
                parameter.grad.add_(decay.add_(buffer, alpha=self.momentum) if self.nesterov else buffer)


@dataclasses.dataclass(kw_only=True)
class Adam(TorchOptimizer, name="adam"):
    """Adam: steps scaled by running moments of the gradient.

    Source: Kingma, Ba, "Adam: A Method for Stochastic Optimization" (2015), algorithm 1.

    Builds torch.optim.Adam.
    """

    default_lr: ClassVar[float] = 0.001
    built: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.Adam

    beta1: Annotated[float, Ge(0), Lt(1), Doc("decay rate of the mean of gradients")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("decay rate of the mean of squared gradients")] = 0.999
    eps: Annotated[Positive, Doc("added to the root of the second moment before dividing by it")] = 1e-8
    weight_decay: Annotated[PositiveOrZero, Doc("L2 penalty, added to the gradient")] = 0.0


@dataclasses.dataclass(kw_only=True)
class AdamW(Adam, name="adamw"):
    """AdamW: Adam with weight decay that does not affect the moments.

    Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2.

    Builds torch.optim.AdamW.
    """

    built = torch.optim.AdamW

    weight_decay: Annotated[PositiveOrZero, Doc("share of the weight removed per step, times lr")] = 0.01


@dataclasses.dataclass(kw_only=True)
class Adagrad(TorchOptimizer, name="adagrad"):
    """Adagrad: steps scaled by the root of the sum of all squared gradients so far.

    Source: Duchi, Hazan, Singer, "Adaptive subgradient methods for online learning and stochastic optimization" (2011).

    Builds torch.optim.Adagrad.
    """

    default_lr: ClassVar[float] = 0.01
    built = torch.optim.Adagrad
    implementation: ClassVar[Mapping[str, bool]] = {"foreach": True}  # torch's fused version is for CPUs only

    lr_decay: Annotated[PositiveOrZero, Doc("the learning rate is divided by 1 + steps * lr_decay")] = 0.0
    eps: Annotated[Positive, Doc("added to the root of the sum before dividing by it")] = 1e-10
    weight_decay: Annotated[PositiveOrZero, Doc("L2 penalty, added to the gradient")] = 0.0


@dataclasses.dataclass(kw_only=True)
class Rmsprop(TorchOptimizer, name="rmsprop"):
    """RMSprop: steps scaled by the root of a running mean of squared gradients.

    Source: Tieleman, Hinton, "Lecture 6.5: RMSProp" (Neural networks for machine learning, 2012); `centered` is from
    Graves, "Generating sequences with recurrent neural networks" (2013).

    Builds torch.optim.RMSprop.
    """

    default_lr: ClassVar[float] = 0.001
    built = torch.optim.RMSprop
    implementation: ClassVar[Mapping[str, bool]] = {"foreach": True}  # torch has no fused version

    alpha: Annotated[float, Ge(0), Lt(1), Doc("decay rate of the mean of squared gradients")] = 0.99
    momentum: Annotated[float, Ge(0), Lt(1), Doc("share of the momentum buffer that a step keeps")] = 0.0
    centered: Annotated[bool, Doc("divide by gradients' deviation from their mean, not by their size")] = False
    eps: Annotated[Positive, Doc("added to the root before dividing by it")] = 1e-8
    weight_decay: Annotated[PositiveOrZero, Doc("L2 penalty, added to the gradient")] = 0.0
