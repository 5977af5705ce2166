"""How long one operation and one transfer take, from the catalogue's figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from bench.core.topology import Device, Link
from bench.extensions.place.catalog import Catalog
from bench.extensions.place.operations import Operation

# What an optimizer with one moment reads and writes for one byte of parameters: parameter, gradient and moment are
# read, parameter and moment written.
UPDATE_TRAFFIC = 5


class Times(Protocol):
    """Where the lengths of tasks come from."""

    def forward(self, operation: Operation, device: Device) -> float:
        """Return the seconds of an operation's forward pass."""

    def backward(self, operation: Operation, device: Device) -> float:
        """Return the seconds of its backward pass."""

    def update(self, parameters: Sequence[int], device: Device) -> float:
        """Return the seconds in which an optimizer changes parameters of these lengths in bytes."""

    def transfer(self, route: Sequence[Link], nbytes: int) -> float:
        """Return the seconds of a transfer over some links, one after the other."""


@dataclasses.dataclass(frozen=True)
class CatalogTimes(Times):
    """An operation takes what its arithmetic or its memory traffic takes, whichever is longer, and its launch.

    Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (2009); a transfer is the
    usual latency + bytes / rate.
    """

    catalog: Catalog

    @override
    def forward(self, operation: Operation, device: Device) -> float:
        if not operation.nbytes:
            return 0.0
        kind = self.catalog.devices[device.kind]
        share: float = getattr(kind.efficiency, operation.work)
        arithmetic_s = operation.flops / (kind.flops_per_s * share)
        return max(arithmetic_s, operation.nbytes / kind.memory_bytes_per_s) + kind.launch_s

    @override
    def backward(self, operation: Operation, device: Device) -> float:
        return operation.gradients * self.forward(operation, device)

    @override
    def update(self, parameters: Sequence[int], device: Device) -> float:
        kind = self.catalog.devices[device.kind]
        return UPDATE_TRAFFIC * sum(parameters) / kind.memory_bytes_per_s + kind.launch_s

    @override
    def transfer(self, route: Sequence[Link], nbytes: int) -> float:
        kinds = [self.catalog.links[link.kind] for link in route]
        return sum(kind.latency_s for kind in kinds) + nbytes / min(kind.bytes_per_s for kind in kinds)
