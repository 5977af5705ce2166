"""Model of one training step as a list of tasks on devices and links, which run in the order of the list.

The host sends a mini-batch to every pool, devices send each other values and their gradients, pools add their
gradients, and every device updates its own parameters.

A task never overtakes a task that uses the same device or link and comes earlier in the list, as real devices work
through their part of a program in order. So every end time is computed from the tasks' lengths by sums and maxima
alone. Therefore a longer task never makes the whole step shorter, and the step's time lies between the longest chain of
tasks and their sum. Schedulers that choose tasks dynamically do not guarantee this: Graham, "Bounds on multiprocessing
timing anomalies", 1969.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

from typing_extensions import override

from bench.core.topology import Device, Link, Topology
from bench.extensions.place.catalog import Catalog
from bench.extensions.place.operations import Operation

# Bytes that an optimizer with one moment reads and writes per byte of parameters: it reads parameter, gradient and
# moment, and writes parameter and moment.
UPDATE_TRAFFIC = 5


class Times(Protocol):
    """Source of the times of tasks."""

    def forward(self, operation: Operation, device: Device) -> float:
        """Return the seconds of an operation's forward pass."""

    def backward(self, operation: Operation, device: Device) -> float:
        """Return the seconds of an operation's backward pass."""

    def update(self, parameters: Sequence[int], device: Device) -> float:
        """Return the seconds in which an optimizer updates parameters of these lengths in bytes."""

    def transfer(self, route: Sequence[Link], nbytes: int) -> float:
        """Return the seconds of a transfer over the links of a route."""


@dataclasses.dataclass(frozen=True)
class CatalogTimes(Times):
    """Times from the figures of a catalogue.

    An operation takes its launch time plus the longer of arithmetic and memory traffic. A transfer takes the latencies
    of its links plus bytes / slowest rate.

    Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (2009).
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


TaskPurpose = Literal["compute", "batch", "values", "sum"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One operation on a device, or one transfer over the links of a route.

    Attributes:
        name: unique name.
        seconds: duration.
        uses: devices or directions of links that no other task can use at the same time.
        after: names of earlier tasks in the list that must end before this one starts.
        purpose: "compute" for an operation; for a transfer, "batch" for a mini-batch, "values" for activations and
            their gradients, or "sum" for adding gradients.
        nbytes: bytes of a transfer; 0 for an operation.
    """

    name: str
    seconds: float
    uses: tuple[str, ...]
    after: tuple[str, ...] = ()
    purpose: TaskPurpose = "compute"
    nbytes: int = 0


def end_times(tasks: Sequence[Task]) -> dict[str, float]:
    """Return the end of each task in seconds from the start of the step, by name."""
    ends: dict[str, float] = {}
    free_at: dict[str, float] = {}
    for task in tasks:
        start = max(
            max((ends[name] for name in task.after), default=0.0),
            max((free_at.get(name, 0.0) for name in task.uses), default=0.0),
        )
        ends[task.name] = start + task.seconds
        free_at.update((name, ends[task.name]) for name in task.uses)
    return ends


def makespan(tasks: Sequence[Task]) -> float:
    """Return the seconds until the last task ends."""
    return max(end_times(tasks).values(), default=0.0)


def critical_path(tasks: Sequence[Task]) -> float:
    """Return the seconds of the longest chain of tasks: the makespan if tasks never waited for devices or links."""
    return makespan([dataclasses.replace(task, uses=()) for task in tasks])


def serial_sum(tasks: Sequence[Task]) -> float:
    """Return the seconds of all tasks if they ran one after the other."""
    return sum(task.seconds for task in tasks)


LABEL_NBYTES = 8


def step_tasks(
    operations: Sequence[Operation],
    device_of: Sequence[Mapping[str, str]],
    topology: Topology,
    times: Times,
    *,
    batch_size: int,
) -> list[Task]:
    """Return the step's tasks, in the order in which devices work through them.

    Args:
        operations: the operations of the network, in the order in which they run.
        device_of: for every pool, which holds its own replica, the name of the device of each operation.
        topology: devices and links.
        times: gives the time of each task.
        batch_size: number of samples in the mini-batch of one pool.
    """
    step = _Step(operations, device_of, topology, times)
    step.deal(batch_size)
    step.run_forward()
    step.run_backward()
    if len(device_of) > 1:
        step.sum_gradients()
    step.update()
    return step.tasks


class _Step:
    """Builds the list of tasks; pools alternate at every operation, because they work in parallel."""

    def __init__(
        self,
        operations: Sequence[Operation],
        device_of: Sequence[Mapping[str, str]],
        topology: Topology,
        times: Times,
    ) -> None:
        self.tasks: list[Task] = []
        self._operations, self._device_of, self._topology, self._times = operations, device_of, topology, times
        self._devices = {device.name: device for device in topology.devices}
        self._readers: dict[str, list[Operation]] = {operation.name: [] for operation in operations}
        for operation in operations:
            for name in operation.inputs:
                self._readers[name].append(operation)
        self._gradients_done: dict[str, list[str]] = {device: [] for device in self._devices}

    def deal(self, batch_size: int) -> None:
        """Send every pool its mini-batch, and send the labels to the device that computes the loss."""
        host = self._topology.host
        for pool, device_of in enumerate(self._device_of):
            for operation in self._operations:
                if operation.is_input:
                    to = device_of[operation.name]
                    self._transfer(f"{pool} deal {operation.name}", host, to, operation.value_nbytes, (), "batch")
            to = device_of[self._operations[-1].name]
            self._transfer(f"{pool} deal labels", host, to, LABEL_NBYTES * batch_size, (), "batch")

    def run_forward(self) -> None:
        """Run every operation on its device, and send its result to every other device that reads it."""
        for operation in self._operations:
            for pool, device_of in enumerate(self._device_of):
                here, name = device_of[operation.name], f"{pool} forward {operation.name}"
                after = [
                    f"{pool} forward {producer}" + ("" if device_of[producer] == here else f" to {here}")
                    for producer in operation.inputs
                ]
                if operation.is_input:
                    after.append(f"{pool} deal {operation.name}")
                self._compute(name, here, self._times.forward(operation, self._devices[here]), after)
                for there in dict.fromkeys(device_of[reader.name] for reader in self._readers[operation.name]):
                    if there != here:
                        self._transfer(f"{name} to {there}", here, there, operation.value_nbytes, (name,), "values")

    def run_backward(self) -> None:
        """Run operations in reverse order; each operation that read a result sends back a gradient of it."""
        trained = [operation for operation in reversed(self._operations) if operation.trains]
        for operation, (pool, device_of) in itertools.product(trained, enumerate(self._device_of)):
            here, name = device_of[operation.name], f"{pool} backward {operation.name}"
            readers = [reader for reader in self._readers[operation.name] if reader.trains]
            after = []
            for reader in readers:
                after.append(f"{pool} backward {reader.name}")
                if (there := device_of[reader.name]) != here:  # gradients are added here: one device sets the order
                    after.append(f"{name} from {reader.name}")
                    self._transfer(after[-1], there, here, operation.value_nbytes, after[-2:-1], "values")
            if not readers:  # the last operation: its gradient comes from the loss
                after += [f"{pool} forward {operation.name}", f"{pool} deal labels"]
            self._compute(name, here, self._times.backward(operation, self._devices[here]), after)
            if operation.parameters:
                self._gradients_done[here].append(name)

    def sum_gradients(self) -> None:
        """Add the replicas' gradients in the first host's memory: each writes its own, adds a chunk, and reads the sum.

        With n replicas of N bytes of gradient, each replica writes N (1 + 1/n) bytes and reads 2 N (n-1)/n bytes.
        """
        host = self._topology.host
        for owners, parameters in self._replicas():
            nbytes, n = sum(parameters), len(owners)
            chunk, others = nbytes // n, nbytes * (n - 1) // n
            published, added = [f"publish {owner}" for owner in owners], [f"add {owner}" for owner in owners]
            for owner in owners:
                self._transfer(f"publish {owner}", owner, host, nbytes, self._gradients_done[owner], "sum")
            for owner in owners:
                self._transfer(f"read {owner}", host, owner, others, published, "sum")
                self._transfer(f"add {owner}", owner, host, chunk, (f"read {owner}",), "sum")
            for owner in owners:
                self._transfer(f"take {owner}", host, owner, others, added, "sum")
                self._gradients_done[owner] = [f"take {owner}"]

    def update(self) -> None:
        """Update the parameters on every device that holds some."""
        for owners, parameters in self._replicas():
            for owner in owners:
                seconds = self._times.update(parameters, self._devices[owner])
                self._compute(f"update {owner}", owner, seconds, self._gradients_done[owner])

    def _replicas(self) -> list[tuple[tuple[str, ...], list[int]]]:
        """Return the devices that hold the same parameters, one in each pool, and these parameters' bytes."""
        held: dict[tuple[str, ...], dict[str, int]] = {}
        for operation in self._operations:
            if operation.parameters:
                owners = tuple(device_of[operation.name] for device_of in self._device_of)
                held.setdefault(owners, {}).update(operation.parameters)
        return [(owners, list(parameters.values())) for owners, parameters in held.items()]

    def _compute(self, name: str, device: str, seconds: float, after: Iterable[str]) -> None:
        self.tasks.append(Task(name=name, seconds=seconds, uses=(device,), after=tuple(after)))

    def _transfer(
        self, name: str, source: str, to: str, nbytes: int, after: Iterable[str], purpose: TaskPurpose
    ) -> None:
        route = self._topology.route(source, to)
        self.tasks.append(
            Task(
                name=name,
                seconds=self._times.transfer(route, nbytes),
                uses=tuple(directions(route, source)),
                after=tuple(after),
                purpose=purpose,
                nbytes=nbytes,
            )
        )


def directions(route: Sequence[Link], source: str) -> list[str]:
    """Return the directions of a route's links that a transfer uses; links carry both directions at the same time."""
    used = []
    position = source
    for link in route:
        onward = link.to if link.node == position else link.node
        used.append(f"{position} to {onward}")
        position = onward
    return used
