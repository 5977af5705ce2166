"""The plan: which process is which device, and which devices together hold one replica of the network."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch import nn

from bench.core.topology import Device, Topology
from bench.strategies.placed.assignment import ActivationPolicy, Assignment, assign, trace
from bench.strategies.placed.messages import HOST_RANK
from bench.strategies.placed.stage import Route

Split = Literal["type", "data", "both"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Map ranks to devices: rank 0 is the host, and the devices follow in the order of the topology.

    Attributes:
        pools: the devices of each replica; devices at the same index hold the same part of it.
        ranks: the ranks of these devices, in the same order.
        host: name of the host that sends the data.
    """

    pools: tuple[tuple[Device, ...], ...]
    ranks: tuple[tuple[int, ...], ...]
    host: str

    @classmethod
    def of(cls, topology: Topology, by: Split) -> Plan:
        """Return the plan: one replica over all devices (type), one per device (data), or one per pool (both)."""
        devices = topology.devices
        match by:
            case "type":
                pools = [devices]
            case "data":
                pools = [(device,) for device in devices]
            case "both":
                pools = topology.pools()
        rank_of = {device.name: rank for rank, device in enumerate(devices, start=HOST_RANK + 1)}
        ranks = tuple(tuple(rank_of[device.name] for device in pool) for pool in pools)
        return cls(pools=tuple(pools), ranks=ranks, host=topology.host)

    @property
    def num_replicas(self) -> int:
        """Return the number of replicas, which is also the number of mini-batches per step."""
        return len(self.pools)

    @property
    def device_ranks(self) -> list[int]:
        """Return every rank except the host's."""
        return sorted(rank for ranks in self.ranks for rank in ranks)

    def place(self, rank: int) -> tuple[int, int]:
        """Return (replica, index within its pool) of a device."""
        return next((r, ranks.index(rank)) for r, ranks in enumerate(self.ranks) if rank in ranks)

    def peers(self, index: int) -> list[int]:
        """Return the ranks of the devices that hold the same part, one in every replica."""
        return [ranks[index] for ranks in self.ranks]

    def assign(self, model: nn.Module, activations: ActivationPolicy) -> tuple[Assignment, list[Route]]:
        """Return the assignment of operations to the first replica's devices, and a route for every replica.

        Raises:
            UsageError: the model cannot be traced.
        """
        traced = trace(model)
        assignment = assign(traced, self.pools[0], activations)
        index_of = {device.name: index for index, device in enumerate(self.pools[0])}
        device_of = {node: index_of[name] for node, name in assignment.device_of.items()}
        return assignment, [Route(traced=traced, device_of=device_of, ranks=ranks) for ranks in self.ranks]
