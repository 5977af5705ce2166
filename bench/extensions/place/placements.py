"""Place a network's operations on devices in several ways, compute what a training step costs, and print the costs.

Three kinds of placements are compared: by type, with activations on the device of their input, and all on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Self, TypeAlias

from rich.table import Table
from torch import fx

from bench.cli.console import plain_table, print_json, stdout_console
from bench.core.units import format_bytes, format_seconds
from bench.extensions.place.assignment import ActivationPolicy, assign
from bench.extensions.place.catalog import Catalog
from bench.extensions.place.step import CatalogTimes, DeviceJob, Operation, directions, end_times, step_tasks
from bench.extensions.place.topology import Topology

BY_TYPE = "by type"
MATRIX_AND_CONVOLUTION = "matrix and convolution only"

# For every pool of devices, each of which holds a replica of the network: the name of the device that runs each
# operation, by the operation's name.
Placement: TypeAlias = Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceCost:
    """One device's part of a step.

    Attributes:
        name, role, kind: as in the device file.
        operations: number of operations that the device runs.
        busy_s: seconds in which the device works.
    """

    name: str
    role: str
    kind: str
    operations: int
    busy_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkUse:
    """One link's part of a step.

    Attributes:
        node, to: names of the link's two ends; in the tree of devices and switches below a host, `to` is nearer to the
            host.
        kind: as in the device file.
        nbytes_to_host: bytes from `node` to `to`.
        nbytes_from_host: bytes from `to` to `node`.
        busy_s: seconds of all transfers over the link, in both directions together.
    """

    node: str
    to: str
    kind: str
    nbytes_to_host: int
    nbytes_from_host: int
    busy_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Time and traffic of one training step with one placement.

    Attributes:
        makespan_s: seconds of the step.
        critical_path_s: seconds of the longest chain of dependent tasks, as if no task waited for a device or link.
        serial_s: seconds of all tasks, one after the other.
        compute_s: seconds of all operations, one after the other.
        transfer_s: seconds of all transfers, one after the other.
        cut_nbytes: bytes of activations and their gradients that are sent from device to device.
        cut_transfers: number of these transfers.
        devices, links: the part of each device and each link.
        transfer_share: transfer_s / serial_s.
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
    transfer_share: float

    @classmethod
    def of(cls, tasks: Sequence[DeviceJob], placement: Placement, topology: Topology) -> Self:
        """Return the cost of a step that consists of these tasks.

        Args:
            tasks: the result of `step_tasks` for this placement and topology.
            placement: the device of each operation.
            topology: devices and links.
        """
        serial_s = sum(task.seconds for task in tasks)
        transfer_s = sum(task.seconds for task in tasks if task.purpose != "compute")
        cut = [task for task in tasks if task.purpose == "values"]
        devices = tuple(
            DeviceCost(
                name=device.name,
                role=device.role,
                kind=device.kind,
                operations=sum(list(device_of.values()).count(device.name) for device_of in placement),
                busy_s=sum(task.seconds for task in tasks if task.uses == (device.name,)),
            )
            for device in topology.devices
        )
        links = []
        for link in topology.links + topology.bridges:
            (up,), (down,) = directions([link], link.node), directions([link], link.to)
            links.append(
                LinkUse(
                    node=link.node,
                    to=link.to,
                    kind=link.kind,
                    nbytes_to_host=sum(task.nbytes for task in tasks if up in task.uses),
                    nbytes_from_host=sum(task.nbytes for task in tasks if down in task.uses),
                    busy_s=sum(task.seconds for task in tasks if up in task.uses or down in task.uses),
                )
            )
        return cls(
            makespan_s=max(end_times(tasks).values()),
            critical_path_s=max(end_times([dataclasses.replace(task, uses=()) for task in tasks]).values()),
            serial_s=serial_s,
            compute_s=sum(task.seconds for task in tasks if task.purpose == "compute"),
            transfer_s=transfer_s,
            cut_nbytes=sum(task.nbytes for task in cut),
            cut_transfers=len(cut),
            devices=devices,
            links=tuple(links),
            transfer_share=transfer_s / serial_s,
        )

    def break_even_bytes_per_s(self, other: Cost) -> float | None:
        """Return the link rate at which sending this placement's extra bytes takes as long as its operations save.

        The rate is extra bytes sent / seconds saved by the operations, both compared with `other`. It ignores latencies
        and assumes that nothing overlaps. None if the operations save nothing.
        """
        gained_s = other.compute_s - self.compute_s
        return (self.cut_nbytes - other.cut_nbytes) / gained_s if gained_s > 0 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of several placements on the same links.

    Attributes:
        by_placement: costs by the placement's title.
        best_single: title of the fastest of the placements that use one device only.
    """

    by_placement: Mapping[str, Cost]
    best_single: str


class PlacementComparison:
    """Place one network's operations on devices in several ways, and compute the time and traffic of each placement.

    Args:
        traced: the network, traced by torch.fx.
        operations: the operations of the network.
        topology: devices and links.
        activations: the policy that selects the devices of activations when operations are placed by type.
        batch_size: number of samples in the mini-batch of one pool (the devices that hold one copy of the network).

    Attributes:
        notes: one sentence for each kind of operation whose preferred role (such as "gpu") no device has; it names the
            role that is used instead.
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
        self.notes = by_type[0].notes
        self._placements = {
            BY_TYPE: [each.device_of for each in by_type],
            MATRIX_AND_CONVOLUTION: [assign(traced, pool, "producer").device_of for pool in pools],
            **self._singles,
        }

    def costs(self, catalog: Catalog, link: str | None = None) -> Costs:
        """Return the costs of every placement.

        Args:
            catalog: figures of kinds of devices and links.
            link: the kind that all links shall have; None if each has the kind that the topology gives.

        Raises:
            UsageError: the catalogue has no figures for a device or link.
        """
        topology = self._topology
        if link is not None:
            topology = dataclasses.replace(
                topology,
                links=tuple(dataclasses.replace(own, kind=link) for own in topology.links),
                bridges=tuple(dataclasses.replace(own, kind=link) for own in topology.bridges),
            )
        catalog.check(topology)
        times, costs = CatalogTimes(catalog), {}
        for title, placement in self._placements.items():
            tasks = step_tasks(self._operations, placement, topology, times, batch_size=self._batch_size)
            costs[title] = Cost.of(tasks, placement, topology)
        return Costs(by_placement=costs, best_single=min(self._singles, key=lambda title: costs[title].makespan_s))


def print_costs(comparison: PlacementComparison, catalog: Catalog, title: str, *, as_json: bool) -> None:
    """Print conclusions, and the costs of every placement: on the topology's links, and if all links were of one kind.

    Args:
        comparison: the placements.
        catalog: figures of kinds of devices and links.
        title: text that names the step.
        as_json: True to print JSON for programs; False to print tables for people.
    """
    own = comparison.costs(catalog)
    by_link = {link: comparison.costs(catalog, link) for link in catalog.links}
    notes = [*comparison.notes, *verdict(own)]
    if as_json:
        by_type, single = own.by_placement[BY_TYPE], own.by_placement[own.best_single]
        print_json(
            {
                "title": title,
                "figures": "modelled",
                "placements": {name: dataclasses.asdict(cost) for name, cost in own.by_placement.items()},
                "best_single": own.best_single,
                "break_even_bytes_per_s": by_type.break_even_bytes_per_s(single),
                "notes": notes,
                "by_link": {
                    kind: {name: cost.makespan_s for name, cost in each.by_placement.items()}
                    for kind, each in by_link.items()
                },
                "links": {name: dataclasses.asdict(kind) for name, kind in catalog.links.items()},
                "devices": {name: dataclasses.asdict(kind) for name, kind in catalog.devices.items()},
            }
        )
        return
    console = stdout_console()
    for table in (_placements(own, title), _devices(own, catalog), _links(own, catalog), _by_link(by_link, catalog)):
        console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def verdict(costs: Costs) -> list[str]:
    """Return sentences that compare two step times: operations placed by type, and all on the best single device.

    They also give break-even rates of links: the rates at which transfers cost as much time as operations save. The
    last sentence is about moving activations to their own devices.
    """
    by_type, without = costs.by_placement[BY_TYPE], costs.by_placement[MATRIX_AND_CONVOLUTION]
    single = costs.by_placement[costs.best_single]
    if not by_type.cut_nbytes:
        return [
            f"Placing by type puts everything on one device: {format_seconds(by_type.makespan_s)} per step (modelled)."
        ]
    ratio = by_type.makespan_s / single.makespan_s
    outcome = "loses" if ratio > 1 else "wins"
    first = (
        f"Placing by type {outcome}: {format_seconds(by_type.makespan_s)} per step, {_times(ratio)} the "
        f"{format_seconds(single.makespan_s)} of {costs.best_single} (modelled)."
    )
    if (rate := by_type.break_even_bytes_per_s(single)) is None:
        second = (
            f"There is no break-even rate: on any links, the operations take {format_seconds(by_type.compute_s)} "
            f"by type and {format_seconds(single.compute_s)} {costs.best_single}."
        )
    else:
        second = (
            f"At its break-even rate of {format_bytes(rate)}/s, transfers would take as long as its operations save."
        )
    return [first, second, _activations_break_even(by_type, without)]


def _activations_break_even(by_type: Cost, without: Cost) -> str:
    if by_type.cut_nbytes <= without.cut_nbytes:
        return "Activations transfer no more bytes than they would on the device that computes their input."
    moved = f"Activations on their own device transfer {format_bytes(by_type.cut_nbytes - without.cut_nbytes)} more"
    rate = by_type.break_even_bytes_per_s(without)
    if rate is None:
        return f"{moved} than {MATRIX_AND_CONVOLUTION}, and the operations are not faster."
    gained = format_seconds(without.compute_s - by_type.compute_s)
    outcome = "loses" if by_type.makespan_s > without.makespan_s else "wins"
    return (
        f"{moved} than {MATRIX_AND_CONVOLUTION}, and the operations take {gained} less: it {outcome} here, and breaks "
        f"even at {format_bytes(rate)}/s."
    )


def _placements(costs: Costs, title: str) -> Table:
    headings = ("placement", "makespan", "critical path", "serial sum", "operations", "link time", "share of link time",
                "sent between devices", "against the best device")  # fmt: skip
    best = costs.by_placement[costs.best_single].makespan_s
    rows = [
        (
            name,
            *map(format_seconds, (cost.makespan_s, cost.critical_path_s, cost.serial_s)),
            *map(format_seconds, (cost.compute_s, cost.transfer_s)),
            f"{cost.transfer_share:.1%}",
            format_bytes(cost.cut_nbytes),
            _times(cost.makespan_s / best),
        )
        for name, cost in costs.by_placement.items()
    ]
    return _table(f"{title}: one training step, modelled", headings, rows)


def _devices(costs: Costs, catalog: Catalog) -> Table:
    rows = [
        (
            device.name,
            device.role,
            device.kind,
            str(device.operations),
            format_seconds(device.busy_s),
            f"{catalog.devices[device.kind].flops_per_s / 1e12:g} TFLOP/s",
            f"{format_bytes(catalog.devices[device.kind].memory_bytes_per_s)}/s",
            catalog.devices[device.kind].figures,
        )
        for device in costs.by_placement[BY_TYPE].devices
    ]
    headings = ("device", "role", "kind", "operations", "busy (modelled)", "peak", "memory", "figures")
    return _table("Devices, placed by type", headings, rows)


def _links(costs: Costs, catalog: Catalog) -> Table:
    cost = costs.by_placement[BY_TYPE]
    rows = [
        (
            f"{link.node} - {link.to}",
            link.kind,
            *_figures(catalog, link.kind),
            format_bytes(link.nbytes_to_host),
            format_bytes(link.nbytes_from_host),
            format_seconds(link.busy_s),
            f"{link.busy_s / cost.makespan_s:.1%}",
        )
        for link in cost.links
    ]
    headings = ("link", "kind", "rate", "latency", "figures", "towards the host", "from the host", "busy (modelled)",
                "of the makespan")  # fmt: skip
    return _table("Links, placed by type", headings, rows)


def _by_link(by_link: dict[str, Costs], catalog: Catalog) -> Table:
    rows = []
    for kind, costs in by_link.items():
        shown = [costs.by_placement[name] for name in (BY_TYPE, MATRIX_AND_CONVOLUTION, costs.best_single)]
        by_type, _, single = shown
        rows.append(
            (
                kind,
                *_figures(catalog, kind),
                *(format_seconds(cost.makespan_s) for cost in shown),
                costs.best_single,
                f"{by_type.transfer_share:.1%}",
                _times(by_type.makespan_s / single.makespan_s),
            )
        )
    headings = ("every link", "rate", "latency", "figures", BY_TYPE, MATRIX_AND_CONVOLUTION, "best device", "which",
                "share of link time", "by type against it")  # fmt: skip
    return _table("Modelled makespans if every link were of one kind", headings, rows)


def _figures(catalog: Catalog, kind: str) -> tuple[str, str, str]:
    link = catalog.links[kind]
    return f"{format_bytes(link.bytes_per_s)}/s", format_seconds(link.latency_s), link.figures


def _times(ratio: float) -> str:
    return f"{ratio:.3g}x" if ratio < 999.5 else f"{ratio:.0f}x"


def _table(title: str, headings: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = plain_table(title)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    return table
