"""Model of one training step: a network's operations, and the resulting tasks of devices and links.

Flops and memory traffic of each operation are computed from shapes alone. Matrix products and convolutions are counted
by torch.utils.flop_counter; every other operation counts as one flop per element of its largest tensor. Each tensor is
read or written once; a view moves no bytes.

The host sends a mini-batch to every pool (the devices that together hold one copy of the network). Devices send each
other values and their gradients, the gradients of all pools are added, and every device updates its own parameters.
These tasks are listed in the order in which they run.

A task never overtakes a task that uses the same device or link and comes earlier in the list, as real devices work
through their part of a program in order. So every end time is computed from the tasks' lengths by sums and maxima
alone. Therefore a longer task never makes the whole step shorter, and the step's time lies between that of the longest
chain of tasks and the sum of all tasks' times. Schedulers that choose tasks dynamically do not guarantee this: Graham,
"Bounds on multiprocessing timing anomalies", 1969.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from bench.core import spec
from bench.core.errors import UsageError
from bench.datasets.base import IMAGE_SIZE
from bench.extensions.place.assignment import Work, parameters_of, trace, work_of
from bench.extensions.place.catalog import Catalog
from bench.extensions.place.topology import Device, Link, Topology
from bench.models.base import Model, try_forward
from collectives.options import Incompatible


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One node of a network's graph, as traced by torch.fx.

    Attributes:
        name: name of the node.
        kind: class name of the module, or name of the function or method.
        work: matrix, convolution, activation or other; each has its own efficiency in `catalog.Efficiency`.
        flops: flops of the forward pass.
        nbytes: bytes that the forward pass reads and writes; 0 for inputs and views, which take no time.
        value_nbytes: bytes of the result.
        parameters: bytes of each trained parameter that the operation reads, by name.
        inputs: names of the operations whose results this operation reads.
        is_input: True for input data, which the host sends.
        trains: True if a gradient of the result is needed.
        gradients: number of gradients that the operation's backward pass computes, 0 to 2: one for all inputs together,
            and one for all parameters together. Each gradient takes about as long as the forward pass.
    """

    name: str
    kind: str
    work: Work
    flops: float
    nbytes: int
    value_nbytes: int
    parameters: Mapping[str, int]
    inputs: tuple[str, ...]
    is_input: bool
    trains: bool
    gradients: int


def network_of(
    model: str, *, num_classes: int, batch_size: int, image_size: int = IMAGE_SIZE
) -> tuple[fx.GraphModule, list[Operation]]:
    """Return the traced network of a model and its operations on one mini-batch of square colour images.

    Raises:
        UsageError: there is no such model, it cannot be traced, or it cannot process images of this size.
    """
    component = cast(Model, spec.build("models", model))
    with torch.device("meta"):
        network = component.build(num_classes)
        traced = trace(network)
        images = torch.empty(batch_size, 3, image_size, image_size)
        try:
            try_forward(network, model, images)
        except Incompatible as reason:
            raise UsageError(f"{reason}; use another --model or --image-size") from None
        return traced, operations_of(traced, images)


def operations_of(traced: fx.GraphModule, *inputs: torch.Tensor) -> list[Operation]:
    """Return the network's operations, in the order in which they run.

    Args:
        traced: the network on the meta device.
        inputs: one mini-batch on the meta device.

    Raises:
        UsageError: the operations depend on the values of the inputs.
    """
    recorder = _Recorder(traced)
    try:
        recorder.run(*inputs)
    except Exception as error:  # noqa: BLE001 - the network's own code runs on meta tensors and may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UsageError(
            f"the model's operations cannot be determined from shapes ({reason}); use a model whose operations do not "
            "depend on values"
        ) from None
    return recorder.operations


class _Recorder(fx.Interpreter):
    """Run every node on meta tensors, and record its operation."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.operations: list[Operation] = []
        self._traced = traced
        self._trains: dict[str, bool] = {}

    @override
    def run_node(self, n: fx.Node) -> Any:
        arguments = [self.env[node] for node in n.all_input_nodes]
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        if n.op == "output":
            return value
        results = list(_tensors(value))
        parameters = {name: self._traced.get_parameter(name).nbytes for name in parameters_of(n, self._traced)}
        flows = any(self._trains[producer.name] for producer in n.all_input_nodes)
        trains = (flows or bool(parameters)) and any(result.is_floating_point() for result in results)
        self._trains[n.name] = trains
        made = [result for result in results if result._base is None and all(result is not a for a in arguments)]
        is_computed = bool(made) and n.op.startswith("call_")
        module, kind = None, getattr(n.target, "__name__", str(n.target))
        if n.op == "call_module":
            module = self._traced.get_submodule(str(n.target))
            kind = type(module).__name__
        state = [] if module is None else [*module.parameters(), *module.buffers()]
        touched = [*_tensors(arguments), *results, *state] if is_computed else []
        self.operations.append(
            Operation(
                name=n.name,
                kind=kind,
                work=work_of(n, self._traced),
                flops=counter.get_total_flops() or max((tensor.numel() for tensor in touched), default=0),
                nbytes=sum(tensor.nbytes for tensor in touched),
                value_nbytes=sum(result.nbytes for result in results),
                parameters=parameters,
                inputs=tuple(producer.name for producer in n.all_input_nodes),
                is_input=n.op == "placeholder",
                trains=trains,
                gradients=trains * flows + trains * bool(parameters) if is_computed else 0,
            )
        )
        return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


# Bytes that an optimizer with one moment reads and writes per byte of parameters: the optimizer reads parameter,
# gradient and moment, and writes parameter and moment.
UPDATE_TRAFFIC = 5


@dataclasses.dataclass(frozen=True)
class CatalogTimes:
    """Compute times from the figures of a catalogue.

    An operation takes its launch time plus the longer of arithmetic and memory traffic. A transfer takes the latencies
    of its links plus bytes / slowest rate.

    Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (2009).
    """

    catalog: Catalog

    def forward(self, operation: Operation, device: Device) -> float:
        """Return the seconds of an operation's forward pass on a device."""
        if not operation.nbytes:
            return 0.0
        kind = self.catalog.devices[device.kind]
        share: float = getattr(kind.efficiency, operation.work)
        arithmetic_s = operation.flops / (kind.flops_per_s * share)
        return max(arithmetic_s, operation.nbytes / kind.memory_bytes_per_s) + kind.launch_s

    def backward(self, operation: Operation, device: Device) -> float:
        """Return the seconds of an operation's backward pass on a device."""
        return operation.gradients * self.forward(operation, device)

    def update(self, parameters: Sequence[int], device: Device) -> float:
        """Return the seconds that an optimizer on a device takes to update parameters of these lengths in bytes."""
        kind = self.catalog.devices[device.kind]
        return UPDATE_TRAFFIC * sum(parameters) / kind.memory_bytes_per_s + kind.launch_s

    def transfer(self, route: Sequence[Link], nbytes: int) -> float:
        """Return the seconds that this many bytes take to travel over the links of a route."""
        kinds = [self.catalog.links[link.kind] for link in route]
        return sum(kind.latency_s for kind in kinds) + nbytes / min(kind.bytes_per_s for kind in kinds)


JobPurpose = Literal["compute", "batch", "values", "sum"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceJob:
    """One operation on a device, or one transfer over the links of a route.

    Attributes:
        name: a name that no other task of the step has.
        seconds: seconds that the task takes.
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
    purpose: JobPurpose = "compute"
    nbytes: int = 0


def end_times(tasks: Sequence[DeviceJob]) -> dict[str, float]:
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


LABEL_NBYTES = 8


def step_tasks(
    operations: Sequence[Operation],
    device_of: Sequence[Mapping[str, str]],
    topology: Topology,
    times: CatalogTimes,
    *,
    batch_size: int,
) -> list[DeviceJob]:
    """Return the tasks of one training step, in the order in which devices and links work through them.

    Args:
        operations: the operations of the network, in the order in which they run.
        device_of: for every pool (the devices that together hold one copy of the network), the name of the device that
            runs each operation, by the operation's name.
        topology: devices and links.
        times: gives the time of each task.
        batch_size: number of samples in the mini-batch of one pool.
    """
    step = _Step(operations, device_of, topology, times)
    step.send_batches(batch_size)
    step.run_forward()
    step.run_backward()
    if len(device_of) > 1:
        step.sum_gradients()
    step.update()
    return step.tasks


class _Step:
    """Build the list of tasks of a step.

    A pool is the devices that together hold one copy of the network. Pools work in parallel, so all pools' tasks for an
    operation stand together in the list.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        device_of: Sequence[Mapping[str, str]],
        topology: Topology,
        times: CatalogTimes,
    ) -> None:
        self.tasks: list[DeviceJob] = []
        self._operations, self._device_of, self._topology, self._times = operations, device_of, topology, times
        self._devices = {device.name: device for device in topology.devices}
        self._readers: dict[str, list[Operation]] = {operation.name: [] for operation in operations}
        for operation in operations:
            for name in operation.inputs:
                self._readers[name].append(operation)
        self._gradients_done: dict[str, list[str]] = {device: [] for device in self._devices}

    def send_batches(self, batch_size: int) -> None:
        """Send every copy of the network a mini-batch, and its labels to the device that computes the copy's loss."""
        host = self._topology.host
        for pool, device_of in enumerate(self._device_of):
            for operation in self._operations:
                if operation.is_input:
                    to = device_of[operation.name]
                    self._transfer(f"{pool} batch {operation.name}", host, to, operation.value_nbytes, (), "batch")
            to = device_of[self._operations[-1].name]
            self._transfer(f"{pool} batch labels", host, to, LABEL_NBYTES * batch_size, (), "batch")

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
                    after.append(f"{pool} batch {operation.name}")
                forward_s = self._times.forward(operation, self._devices[here])
                self.tasks.append(DeviceJob(name=name, seconds=forward_s, uses=(here,), after=tuple(after)))
                for there in dict.fromkeys(device_of[reader.name] for reader in self._readers[operation.name]):
                    if there != here:
                        self._transfer(f"{name} to {there}", here, there, operation.value_nbytes, (name,), "values")

    def run_backward(self) -> None:
        """Run operations in reverse order; every operation that read a result sends back the result's gradient."""
        trained = [operation for operation in reversed(self._operations) if operation.trains]
        for operation, (pool, device_of) in itertools.product(trained, enumerate(self._device_of)):
            here, name = device_of[operation.name], f"{pool} backward {operation.name}"
            readers = [reader for reader in self._readers[operation.name] if reader.trains]
            after = []
            for reader in readers:
                after.append(f"{pool} backward {reader.name}")
                if (there := device_of[reader.name]) != here:  # gradients are added here, in one device's order
                    after.append(f"{name} from {reader.name}")
                    self._transfer(after[-1], there, here, operation.value_nbytes, after[-2:-1], "values")
            if not readers:  # the last operation: its gradient comes from the loss
                after += [f"{pool} forward {operation.name}", f"{pool} batch labels"]
            backward_s = self._times.backward(operation, self._devices[here])
            self.tasks.append(DeviceJob(name=name, seconds=backward_s, uses=(here,), after=tuple(after)))
            if operation.parameters:
                self._gradients_done[here].append(name)

    def sum_gradients(self) -> None:
        """Add the gradients of all n replicas (copies of the network) in the host's memory.

        Each replica writes its gradients there, adds up one n-th of all replicas' gradients, and reads the sums that
        the other replicas computed. With N bytes of gradients, each replica writes N (1 + 1/n) bytes and reads
        2 N (n-1)/n bytes.
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
        """Update the parameters on every device that holds parameters."""
        for owners, parameters in self._replicas():
            for owner in owners:
                self.tasks.append(
                    DeviceJob(
                        name=f"update {owner}",
                        seconds=self._times.update(parameters, self._devices[owner]),
                        uses=(owner,),
                        after=tuple(self._gradients_done[owner]),
                    )
                )

    def _replicas(self) -> list[tuple[tuple[str, ...], list[int]]]:
        """Return (devices, bytes of each parameter) for each part of the network.

        Each copy of the network has one of the devices, which holds this part.
        """
        held: dict[tuple[str, ...], dict[str, int]] = {}
        for operation in self._operations:
            if operation.parameters:
                owners = tuple(device_of[operation.name] for device_of in self._device_of)
                held.setdefault(owners, {}).update(operation.parameters)
        return [(owners, list(parameters.values())) for owners, parameters in held.items()]

    def _transfer(
        self, name: str, source: str, to: str, nbytes: int, after: Iterable[str], purpose: JobPurpose
    ) -> None:
        route = self._topology.route(source, to)
        self.tasks.append(
            DeviceJob(
                name=name,
                seconds=self._times.transfer(route, nbytes),
                uses=tuple(directions(route, source)),
                after=tuple(after),
                purpose=purpose,
                nbytes=nbytes,
            )
        )


def directions(route: Sequence[Link], source: str) -> list[str]:
    """Return the directions in which a transfer from `source` uses the links of a route, each like "gpu0 to host".

    A link carries its two directions at the same time, so only transfers in the same direction wait for each other.
    """
    used = []
    position = source
    for link in route:
        onward = link.to if link.node == position else link.node
        used.append(f"{position} to {onward}")
        position = onward
    return used
