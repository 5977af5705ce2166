"""Dense: a payload that sends every element. Body: the values."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import torch
from typing_extensions import override

from collectives.payloads.base import HEADER_BYTES, KeepLost, Payload, PayloadError, Received
from collectives.payloads.codec.values import add_divided_, add_values, write_divided
from collectives.payloads.fields import VALUE_DTYPES, Field, with_room


@dataclasses.dataclass(eq=False)
class Dense(Payload):
    """A payload that sends every element of a tensor.

    Integer values make sums exact (for example of levels on a shared scale). They wrap on overflow, so choose a type
    that can hold the sum.

    Attributes:
        values: 1-D, floating or integer; shared with the caller.

    Raises:
        PayloadError: `values` is not 1-D.
    """

    code = 1
    dtypes = VALUE_DTYPES
    elementwise = True
    addable = True

    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 1:
            raise PayloadError(
                f"a payload holds 1-D values, got {self.values.dim()} dimensions; flatten the tensor first"
            )
        self.numel = self.values.numel()

    @staticmethod
    def room(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor for `values`, `dtype` [numel], that `pack` does not need to copy."""
        return with_room(HEADER_BYTES, numel, dtype, device)

    @override
    def fields(self) -> list[Field]:
        return [self._header(self.values.dtype), self.values]

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Self:
        if wire.num_entries != wire.numel:
            raise PayloadError("a dense payload must have as many entries as elements")
        return cls(wire.body.tensor(wire.numel, wire.dtype))

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        add_divided_(dense, self.values, divisor)

    @override
    def write_to(self, parts: Sequence[torch.Tensor], *, divisor: float, others: Sequence[Payload] = ()) -> bool:
        if others or not self.values.is_floating_point() or any(part.dtype != torch.float32 for part in parts):
            return False
        for part, values in zip(parts, self.values.split([part.numel() for part in parts]), strict=True):
            write_divided(values, divisor, part)
        return True

    @override
    def _cut(self, start: int, stop: int) -> Payload:
        return Dense(self.values[start:stop])

    @override
    def _add(self, other: Payload, keep_lost: KeepLost | None) -> Payload:
        return Dense(other._added_onto(self.values, keep_lost))

    @override
    def _added_onto(self, values: torch.Tensor, keep_lost: KeepLost | None) -> torch.Tensor:
        return add_values(values, self.values, keep_lost)

    @override
    def with_wire(self, wire: torch.Tensor) -> Payload:
        return Dense(wire)
