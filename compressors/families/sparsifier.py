"""Sparsifiers: what methods that send a few entries share: density, its warm-up, value type, dense first steps.

Source: warm-up of the density (0.25, 0.0625, ... down to the ratio): Lin et al. 2018 (Deep Gradient Compression,
arXiv:1712.01887), section 3.3.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Annotated

import torch
from annotated_types import Gt, Le
from typing_extensions import Doc, override

from collectives.options import OptionError
from collectives.payloads.base import Payload
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.dense import Dense
from collectives.payloads.sparse import IndexedValues, Sparse
from collectives.ranges import CountOrZero
from compressors.base import LossyCompressor, NonFiniteSum
from compressors.kernels.residuals import send_top_k
from compressors.kernels.value_types import TORCH_DTYPES, ValueDtype, roundoff
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class Sparsifier(LossyCompressor, abc.ABC):
    """Sends some entries; the rest waits in the residual.

    Raises:
        OptionError: "topk: momentum_correction=true needs error_feedback=true".
    """

    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True
    dense_steps: Annotated[CountOrZero, Doc("first optimizer steps in which everything is sent, in fp32")] = 0
    momentum_correction: Annotated[
        bool,
        Doc("apply the optimizer's momentum before selection, cleared where sent (the optimizer's own is then off)"),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum_correction and not self.error_feedback:
            raise OptionError(f"{self.component_name}: momentum_correction=true needs error_feedback=true")

    @property
    @override
    def owns_momentum(self) -> bool:
        return self.momentum_correction

    @property
    @override
    def emits(self) -> frozenset[type[Payload]]:
        return super().emits | ({Dense} if self.dense_steps else set())

    @override
    def is_dense_at(self, step_index: int) -> bool:
        return step_index < self.dense_steps

    @abc.abstractmethod
    def _sparse_values(self, numel: int, indices: torch.Tensor, values: torch.Tensor, step: Step) -> IndexedValues:
        """Entries, fp32 [k], at ascending positions as they travel; those that are zero there are left out."""

    def _sparse(self, x: torch.Tensor, indices: torch.Tensor, step: Step) -> IndexedValues:
        """The same from all of `x`."""
        return self._sparse_values(x.numel(), indices, x.index_select(0, indices), step)


@dataclasses.dataclass(kw_only=True)
class TypedSparsifier(Sparsifier):
    """A sparsifier whose values travel in a floating type."""

    value_dtype: Annotated[ValueDtype, Doc("type of the values on the wire")] = "fp16"

    @override
    def _sparse_values(self, numel: int, indices: torch.Tensor, values: torch.Tensor, step: Step) -> Sparse:
        values = to_value_dtype(values, TORCH_DTYPES[self.value_dtype], step.world_size)
        if not values.all():
            indices, values = indices[values != 0], values[values != 0]
        return Sparse(numel, indices, values)

    def _largest_of_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, k: int, step: Step
    ) -> Sparse:
        """The k largest entries of one layer's gradient + residual; the rest goes to `left`. As `encode_sum`.

        Raises:
            NonFiniteSum: one of them is not finite.
        """
        (gradient,) = gradients
        dtype = TORCH_DTYPES[self.value_dtype]
        positions, values, is_finite = send_top_k(gradient, residual, left, k, dtype, step.world_size)
        if not is_finite:
            raise NonFiniteSum
        return Sparse(left.numel(), positions, values)

    def _bound_for(self, share: float) -> float:
        """The contraction of sending entries that hold at least this share of the squares, rounded."""
        return 1 - share * (1 - roundoff(self.value_dtype) ** 2)


@dataclasses.dataclass(kw_only=True)
class ShareSparsifier(Sparsifier):
    """A sparsifier that is told how many entries to keep."""

    ratio: Annotated[float, Gt(0), Le(1), Doc("kept entries / entries")] = 0.01
    warmup_epochs: Annotated[CountOrZero, Doc("epochs in which the density falls as 0.25^(epoch+1) down to ratio")] = 4

    @property
    @override
    def denser_epochs(self) -> int:
        falling = range(self.warmup_epochs)
        return next((epoch for epoch in falling if 0.25 ** (epoch + 1) <= self.ratio), self.warmup_epochs)

    def density(self, step: Step) -> float:
        """Return the share of the entries to keep at this step, in (0, 1]."""
        if step.warmup and step.epoch < self.warmup_epochs:
            return max(self.ratio, 0.25 ** (step.epoch + 1))
        return self.ratio

    @override
    def density_for(self, layer: Layer, step: Step) -> float:
        return self.density(step)


@dataclasses.dataclass(kw_only=True)
class DensitySparsifier(ShareSparsifier, TypedSparsifier):
    """Both: told how many entries to keep, whose values travel in a floating type."""


def num_kept(density: float, numel: int) -> int:
    """Return how many of `numel` entries a density keeps: rounded half up, at least 1, at most all; 0 of none."""
    return min(numel, max(1, int(density * numel + 0.5)))
