"""Calibration of the step model on this machine: times of operations and messages are fitted to runs, not data sheets.

Each device is a process on this machine's CPU. An operation takes a + b * flops + c * bytes seconds. The coefficients
of each kind of operation and direction are fitted to networks that are run node by node in one process. The time of a
message, and how much processes on shared cores slow each other down, are fitted to the steps of whole runs.
"""

import collections
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import least_squares, nnls
from torch import fx
from typing_extensions import override

from bench.extensions.place.catalog import Catalog
from bench.extensions.place.step import CatalogTimes, Operation, end_times, step_tasks
from bench.extensions.place.topology import Device, Link, Topology

Kind = tuple[str, Literal["forward", "backward", "update"]]
Coefficients = tuple[float, float, float]

UPDATE: Kind = ("parameters", "update")
ANY = "any"

_FIRST_GUESS = (100e-6, 1.0)
_LEAST, _MOST = (1e-9, 0.2), (0.1, 20.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured time.

    Attributes:
        kind: the kind of operation and the direction.
        flops, nbytes: flops and bytes of an operation's forward pass; for an update, the number of parameters and their
            bytes.
        seconds: the measured time.
    """

    kind: Kind
    flops: float
    nbytes: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedNetwork:
    """A network on one pool of devices.

    Attributes:
        operations: the operations of the network.
        device_of: the name of each operation's device, by the name of the operation.
        topology: devices and links.
        batch_size: number of samples in a mini-batch.
    """

    operations: Sequence[Operation]
    device_of: Mapping[str, str]
    topology: Topology
    batch_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibratedTimes(CatalogTimes):
    """Times of processes on this machine; the kinds of devices and links do not matter.

    Attributes:
        catalog: not used.
        coefficients: (seconds, seconds per flop, seconds per byte) by kind; `ANY` is used for kinds not measured.
        bytes_per_s: rate of messages.
        message_s: seconds per message that do not depend on its length.
        slowdown: factor on the times of operations, because processes share cores.
    """

    catalog: Catalog = dataclasses.field(default_factory=lambda: Catalog(links={}, devices={}))
    coefficients: Mapping[Kind, Coefficients]
    bytes_per_s: float
    message_s: float = 0.0
    slowdown: float = 1.0

    @classmethod
    def fitted(cls, samples: Sequence[Sample], bytes_per_s: float) -> Self:
        """Return times fitted to the samples, with coefficients that are not negative."""
        kinds = {sample.kind: [other for other in samples if other.kind == sample.kind] for sample in samples}
        for _, direction in list(kinds):
            kinds[ANY, direction] = [sample for sample in samples if sample.kind[1] == direction]
        return cls(coefficients={kind: _fit(found) for kind, found in kinds.items()}, bytes_per_s=bytes_per_s)

    def calibrated(self, measured: Sequence[tuple[PlacedNetwork, float]]) -> Self:
        """Return these times with the message time and the slowdown fitted to (network, measured seconds of a step)."""

        def relative_errors(logarithms: npt.NDArray[np.float64]) -> list[float]:
            times = self._with_logarithms(logarithms)
            return [math.log(times.step(network) / seconds) for network, seconds in measured]

        return self._with_logarithms(
            least_squares(relative_errors, np.log(_FIRST_GUESS), bounds=(np.log(_LEAST), np.log(_MOST))).x
        )

    def step(self, network: PlacedNetwork) -> float:
        """Return the modelled seconds of one step of a network."""
        device_of, topology = [network.device_of], network.topology
        tasks = step_tasks(network.operations, device_of, topology, self, batch_size=network.batch_size)
        return max(end_times(tasks).values())

    @override
    def forward(self, operation: Operation, device: Device) -> float:
        return (
            0.0 if operation.is_input else self._seconds((operation.kind, "forward"), operation.flops, operation.nbytes)
        )

    @override
    def backward(self, operation: Operation, device: Device) -> float:
        return self._seconds((operation.kind, "backward"), operation.flops, operation.nbytes)

    @override
    def update(self, parameters: Sequence[int], device: Device) -> float:
        return self._seconds(UPDATE, len(parameters), sum(parameters))

    @override
    def transfer(self, route: Sequence[Link], nbytes: int) -> float:
        return self.message_s + nbytes / self.bytes_per_s

    def _with_logarithms(self, logarithms: npt.NDArray[np.float64]) -> Self:
        message_s, slowdown = np.exp(logarithms).tolist()
        return dataclasses.replace(self, message_s=message_s, slowdown=slowdown)

    def _seconds(self, kind: Kind, flops: float, nbytes: float) -> float:
        known = kind if kind in self.coefficients else (ANY, kind[1])
        constant, per_flop, per_byte = self.coefficients[known]
        return self.slowdown * (constant + per_flop * flops + per_byte * nbytes)


def _fit(samples: Sequence[Sample]) -> Coefficients:
    """Fit by least squares with weights 1 / seconds: between absolute errors (1) and relative errors (1 / seconds^2).

    With relative errors, sums would be too small, because samples that other work slowed down would have little weight.
    """
    matrix = np.array([(1.0, sample.flops, sample.nbytes) for sample in samples])
    scale = np.maximum(matrix.max(axis=0), 1.0)
    root = np.sqrt([sample.seconds for sample in samples])
    found, _ = nnls(matrix / scale / root[:, None], root)  # scaled, because the columns differ by orders of magnitude
    constant, per_flop, per_byte = (found / scale).tolist()
    return constant, per_flop, per_byte


T = TypeVar("T")

WARM_UP = 5
PARAMETERS = ""


def measure(traced: fx.GraphModule, operations: Sequence[Operation], x: torch.Tensor, repeats: int) -> list[Sample]:
    """Return the median time of every operation, forward and backward, and of the update of all parameters.

    Times are CPU times of this thread, so that other processes do not lengthen them; torch must use one thread.

    Args:
        traced: the network with real parameters, which do not change.
        operations: its operations for a mini-batch of the shape of `x`.
        x: a mini-batch.
        repeats: number of steps that count, after `WARM_UP` steps that do not.
    """
    runner = NodeByNode(traced, {operation.name: operation.kind for operation in operations})
    optimizer = torch.optim.SGD(traced.parameters(), lr=0.0, momentum=0.9)
    for _ in range(WARM_UP + repeats):
        runner.run(x)
        runner.run_backward()
        runner.timed(PARAMETERS, UPDATE, optimizer.step)
        optimizer.zero_grad()
    lengths = [parameter.nbytes for parameter in traced.parameters()]
    work = {operation.name: (operation.flops, operation.nbytes) for operation in operations}
    work[PARAMETERS] = (len(lengths), sum(lengths))
    return [
        Sample(kind=kind, flops=work[name][0], nbytes=work[name][1], seconds=statistics.median(seconds[WARM_UP:]))
        for (name, kind), seconds in runner.seconds.items()
    ]


class NodeByNode(fx.Interpreter):
    """Runs each node as an autograd graph of its own, as devices do.

    Attributes:
        seconds: CPU seconds of every step, by (name of the node, kind).
    """

    def __init__(self, traced: fx.GraphModule, kinds: Mapping[str, str]) -> None:
        super().__init__(traced)
        self.seconds: dict[tuple[str, Kind], list[float]] = collections.defaultdict(list)
        self._kinds = kinds
        self._done: list[tuple[fx.Node, Any, dict[str, torch.Tensor]]] = []

    def timed(self, name: str, kind: Kind, work: Callable[[], T]) -> T:
        """Return the result of `work()` and record its CPU time in this thread."""
        start = time.thread_time()
        result = work()
        self.seconds[name, kind].append(time.thread_time() - start)
        return result

    @override
    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        values = {node: self.env[node] for node in n.all_input_nodes}
        inputs = {
            node: value.detach().requires_grad_() if _wants_gradient(value) else value for node, value in values.items()
        }
        args = fx.node.map_arg(n.args, inputs.__getitem__)
        kwargs = fx.node.map_arg(n.kwargs, inputs.__getitem__)
        work = functools.partial(getattr(self, n.op), n.target, args, kwargs)
        value = self.timed(n.name, (self._kinds[n.name], "forward"), work)
        self._done.append((n, value, {node.name: leaf for node, leaf in inputs.items() if _wants_gradient(leaf)}))
        return value

    def run_backward(self) -> None:
        """Run every node's backward pass in reverse order, from a small constant gradient of the network's result."""
        parts: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
        while self._done:
            node, value, leaves = self._done.pop()
            if _wants_gradient(value):
                start = functools.partial(self._start_backward, value, parts[node.name])
                self.timed(node.name, (self._kinds[node.name], "backward"), start)
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    parts[name].append(leaf.grad)

    def _start_backward(self, value: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        total = sum(parts[1:], start=parts[0]) if parts else torch.full_like(value, 1e-3)
        torch.autograd.backward([value], [total])


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
