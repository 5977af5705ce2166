"""Sparsifier: what every method that sends a few entries shares: density, its warm-up, value type, momentum correction.

Source: warm-up of the density (0.25, 0.0625, ... down to the ratio), momentum correction and momentum factor masking:
Lin et al. 2018 (Deep Gradient Compression, arXiv:1712.01887), sections 3.1 to 3.3. Differs: the velocity is kept per
layer also where the per-layer policy sends a layer whole, so that taking the optimizer's momentum over changes nothing
for those layers.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

from collectives.options import OptionError
from collectives.payloads.base import Payload
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.dense import Dense
from compressors.base import LossyCompressor
from compressors.kernels.value_types import TORCH_DTYPES, ValueDtype, roundoff
from compressors.layer import Layer, Step
from compressors.state import LayerStore, Store
from compressors.unit import Unit


@dataclasses.dataclass(kw_only=True)
class Sparsifier(LossyCompressor):
    """Sends some entries; the rest waits in the residual.

    Raises:
        OptionError: "topk: momentum_correction=true needs error_feedback=true".
    """

    value_dtype: Annotated[ValueDtype, Doc("type of the values on the wire")] = "fp16"
    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True
    dense_steps: Annotated[int, Ge(0), Doc("first optimizer steps in which everything is sent")] = 0
    momentum_correction: Annotated[
        bool,
        Doc("apply the optimizer's momentum before selection, cleared where sent (the optimizer's own is then off)"),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._velocities = LayerStore()
        self._momentum = 0.0
        self._nesterov = False
        if self.momentum_correction and not self.error_feedback:
            raise OptionError(f"{self.component_name}: momentum_correction=true needs error_feedback=true")

    @property
    def owns_momentum(self) -> bool:
        """As the option says."""
        return self.momentum_correction

    def take_over_momentum(self, coefficient: float, *, nesterov: bool = False) -> None:
        """Use the optimizer's momentum here; the caller sets the optimizer's own to 0.

        Args:
            coefficient: share of the last velocity that is kept, in [0, 1).
            nesterov: look ahead along the velocity.
        """
        self._momentum = coefficient
        self._nesterov = nesterov

    @property
    def emits(self) -> frozenset[type[Payload]]:
        """The method's own kinds, and `Dense` where the policy or `dense_steps` sends everything."""
        return super().emits | ({Dense} if self.dense_steps else set())

    def _everything(self, x: torch.Tensor, step: Step) -> Dense | None:
        """All of `x` in the value type while `dense_steps` last, else None."""
        if step.index < self.dense_steps:
            return Dense(to_value_dtype(x, TORCH_DTYPES[self.value_dtype], step.world_size).clone())
        return None

    def _bound_for(self, share: float) -> float:
        """The contraction of sending entries that hold at least this share of the squares, rounded."""
        return 1 - share * (1 - roundoff(self.value_dtype) ** 2)

    def _stores(self) -> dict[str, Store]:
        return super()._stores() | {"velocities": self._velocities}

    def _uncompressed(self, unit: Unit) -> torch.Tensor:
        if not self.momentum_correction:
            return super()._uncompressed(unit)
        velocity = self._accelerate(unit)
        if self._nesterov:
            ahead = torch.empty_like(velocity)
            unit.add_gradient(velocity, out=ahead)
            return ahead
        return velocity.clone()

    def _compensate(self, unit: Unit, step: Step) -> torch.Tensor:
        if not self.momentum_correction:
            return super()._compensate(unit, step)
        velocity = self._accelerate(unit)
        residual = self._residuals.accepted(unit)
        x = self._residuals.propose(unit)
        if residual is None:
            x.copy_(velocity)
        else:
            torch.add(velocity, residual, out=x)
        if self._nesterov:
            unit.add_gradient(x, out=x)
        return x

    def _settle(self, unit: Unit, x: torch.Tensor, payload: Payload) -> None:
        super()._settle(unit, x, payload)
        if self.momentum_correction and not isinstance(payload, Dense):
            payload.clear_in_(self._velocities.proposed(unit))

    def _accelerate(self, unit: Unit) -> torch.Tensor:
        """The proposed velocity, fp32 [unit.numel]: u' = m u + g, or m (u + g) to which nesterov adds g once more."""
        old = self._velocities.accepted(unit)
        velocity = self._velocities.propose(unit)
        unit.add_gradient(old, factor=1.0 if self._nesterov else self._momentum, out=velocity)
        if self._nesterov:
            velocity.mul_(self._momentum)
        return velocity


@dataclasses.dataclass(kw_only=True)
class DensitySparsifier(Sparsifier):
    """A sparsifier that is told how many entries to keep."""

    ratio: Annotated[float, Gt(0), Le(1), Doc("kept entries / entries")] = 0.01
    warmup_epochs: Annotated[int, Ge(0), Doc("epochs in which the density falls as 0.25^(epoch+1) down to ratio")] = 4

    def density(self, step: Step) -> float:
        """Share of the entries to keep at this step, in (0, 1]."""
        if step.warmup and step.epoch < self.warmup_epochs:
            return max(self.ratio, 0.25 ** (step.epoch + 1))
        return self.ratio

    def density_for(self, layer: Layer, step: Step) -> float:
        """The same for every layer."""
        return self.density(step)


def num_kept(density: float, numel: int) -> int:
    """How many of `numel` entries a density keeps: rounded half up, at least one, at most all; 0 of an empty tensor."""
    return min(numel, max(1, int(density * numel + 0.5)))
