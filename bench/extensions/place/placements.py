"""Costs of several placements: by type, with activations on the device of their input, and all on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self, TypeAlias

from torch import fx

from bench.core.topology import Topology
from bench.extensions.place.catalog import Catalog
from bench.extensions.place.operations import Operation
from bench.extensions.place.step import CatalogTimes, Task, critical_path, directions, makespan, serial_sum, step_tasks
from bench.strategies.placed.assignment import ActivationPolicy, assign
from bench.strategies.placed.catalog import check_kinds

BY_TYPE = "by type"
MATRIX_AND_CONVOLUTION = "matrix and convolution only"


# For every pool, which holds its own replica, the name of the device of each operation.
Placement: TypeAlias = Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceCost:
    """One device's part of a step."""

    name: str
    role: str
    kind: str
    operations: int
    busy_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkUse:
    """One link's part of a step.

    `to_host` is the direction from `node` to `to`; below a switch, `to` is nearer to the host.
    """

    node: str
    to: str
    kind: str
    nbytes_to_host: int
    nbytes_from_host: int
    busy_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """One step's time and traffic.

    Attributes:
        makespan_s, critical_path_s, serial_s: seconds of the step, of its longest chain of tasks, and of all tasks one
            after the other.
        compute_s: seconds of all operations, one after the other.
        transfer_s: seconds of all transfers, one after the other.
        cut_nbytes: bytes of activations and their gradients that are sent from device to device.
        cut_transfers: number of these transfers.
        devices, links: the part of each device and each link.
    """

    makespan_s: float
    critical_path_s: float
    serial_s: float
    compute_s: float
    transfer_s: float
    cut_nbytes: int
    cut_transfers: int
    devices: tuple[DeviceCost, ...]
    links: tuple[LinkUse, ...]

    @classmethod
    def of(cls, tasks: Sequence[Task], placement: Placement, topology: Topology) -> Self:
        """Add up a step's tasks."""
        cut = [task for task in tasks if task.purpose == "values"]
        devices = tuple(
            DeviceCost(
                name=device.name,
                role=device.role,
                kind=device.kind,
                operations=sum(list(device_of.values()).count(device.name) for device_of in placement),
                busy_s=serial_sum([task for task in tasks if task.uses == (device.name,)]),
            )
            for device in topology.devices
        )
        links = []
        for link in topology.all_links:
            (up,), (down,) = directions([link], link.node), directions([link], link.to)
            links.append(
                LinkUse(
                    node=link.node,
                    to=link.to,
                    kind=link.kind,
                    nbytes_to_host=sum(task.nbytes for task in tasks if up in task.uses),
                    nbytes_from_host=sum(task.nbytes for task in tasks if down in task.uses),
                    busy_s=serial_sum([task for task in tasks if up in task.uses or down in task.uses]),
                )
            )
        return cls(
            makespan_s=makespan(tasks),
            critical_path_s=critical_path(tasks),
            serial_s=serial_sum(tasks),
            compute_s=serial_sum([task for task in tasks if task.purpose == "compute"]),
            transfer_s=serial_sum([task for task in tasks if task.purpose != "compute"]),
            cut_nbytes=sum(task.nbytes for task in cut),
            cut_transfers=len(cut),
            devices=devices,
            links=tuple(links),
        )

    @property
    def transfer_share(self) -> float:
        """Return the seconds of all transfers / the seconds of all tasks, one after the other."""
        return self.transfer_s / self.serial_s

    def break_even_bytes_per_s(self, other: Cost) -> float | None:
        """Return the break-even rate: extra bytes sent / seconds saved by the operations, compared with `other`.

        At this rate, sending the extra values takes as long as the operations save. None if they save nothing.
        Latencies are ignored, and nothing overlaps.
        """
        gained_s = other.compute_s - self.compute_s
        return (self.cut_nbytes - other.cut_nbytes) / gained_s if gained_s > 0 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Several placements on the same links.

    Attributes:
        by_placement: costs by title.
        best_single: title of the fastest placement on one device.
    """

    by_placement: Mapping[str, Cost]
    best_single: str


class PlacementComparison:
    """Placements of one network, and their costs.

    Args:
        traced: the network.
        operations: its operations.
        topology: devices and links.
        activations: the policy that selects the devices of activations when placing by type.
        batch_size: number of samples in the mini-batch of one pool.

    Attributes:
        notes: one sentence for each kind of operation that does not run on the device for its type.
    """

    def __init__(
        self,
        traced: fx.GraphModule,
        operations: Sequence[Operation],
        topology: Topology,
        *,
        activations: ActivationPolicy,
        batch_size: int,
    ) -> None:
        self._operations, self._topology, self._batch_size = operations, topology, batch_size
        pools = topology.pools()
        self._singles: dict[str, Placement] = {
            f"all on {'/'.join(device.name for device in devices)}": [
                {operation.name: device.name for operation in operations} for device in devices
            ]
            for devices in zip(*pools, strict=True)
        }
        by_type = [assign(traced, pool, activations) for pool in pools]
        by_producer = [assign(traced, pool, "producer") for pool in pools]
        self.notes = by_type[0].notes
        self._placements = {
            BY_TYPE: [each.device_of for each in by_type],
            MATRIX_AND_CONVOLUTION: [each.device_of for each in by_producer],
            **self._singles,
        }

    def costs(self, catalog: Catalog, link: str | None = None) -> Costs:
        """Return the costs of every placement.

        Args:
            catalog: figures of devices and links.
            link: kind of every link; None: the kinds in the topology.

        Raises:
            UsageError: the catalogue has no figures for a device or link.
        """
        topology = self._topology
        if link is not None:
            links = tuple(dataclasses.replace(own, kind=link) for own in topology.links)
            bridges = tuple(dataclasses.replace(own, kind=link) for own in topology.bridges)
            topology = dataclasses.replace(topology, links=links, bridges=bridges)
        check_kinds(topology, catalog.links, catalog.devices)
        times, costs = CatalogTimes(catalog), {}
        for title, placement in self._placements.items():
            tasks = step_tasks(self._operations, placement, topology, times, batch_size=self._batch_size)
            costs[title] = Cost.of(tasks, placement, topology)
        return Costs(by_placement=costs, best_single=min(self._singles, key=lambda title: costs[title].makespan_s))
