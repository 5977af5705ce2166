"""The common options of Adam and AdamW: the decay rates of two moments of the gradient."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from annotated_types import Ge, Lt
from typing_extensions import Doc

from bench.optimizers.base import Optimizer
from collectives.options import Positive


@dataclasses.dataclass(kw_only=True)
class MomentOptimizer(Optimizer):
    """Base of the components `adam` and `adamw`, with their common options."""

    default_lr: ClassVar[float] = 0.001

    beta1: Annotated[float, Ge(0), Lt(1), Doc("decay rate of the mean of gradients")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("decay rate of the mean of squared gradients")] = 0.999
    eps: Annotated[Positive, Doc("added to the root of the second moment before dividing by it")] = 1e-8
