"""The model of a step, calibrated on this machine: figures of operations and messages from runs, not data sheets.

Each device is a process on this machine's CPU. An operation takes a + b flops + c bytes, with coefficients for each
kind of operation and direction that are fitted to networks run node by node in one process. What a message costs, and
how much processes on shared cores hold each other up, is fitted to the steps of whole runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls
from typing_extensions import override

from bench.core.topology import Device, Link, Topology
from bench.extensions.place.operations import Operation
from bench.extensions.place.schedule import makespan
from bench.extensions.place.step import step_tasks
from bench.extensions.place.times import Times

Kind = tuple[str, Literal["forward", "backward", "update"]]
Coefficients = tuple[float, float, float]
Logarithms = npt.NDArray[np.float64]

UPDATE: Kind = ("parameters", "update")
ANY = "any"

_FIRST_GUESS = (100e-6, 1.0)
_LEAST, _MOST = (1e-9, 0.2), (0.1, 20.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured time.

    Attributes:
        kind: what was done.
        flops, nbytes: of an operation's forward pass; of an update, the number of parameters and their bytes.
        seconds: how long it took.
    """

    kind: Kind
    flops: float
    nbytes: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedNetwork:
    """A network on one pool of devices.

    Attributes:
        operations: the network's.
        device_of: the device of each.
        topology: devices and links.
        batch_size: samples in a mini-batch.
    """

    operations: Sequence[Operation]
    device_of: Mapping[str, str]
    topology: Topology
    batch_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibratedTimes(Times):
    """Times of processes on this machine, whatever the devices' and links' kinds.

    Attributes:
        coefficients: (seconds, seconds per flop, seconds per byte) by kind; `ANY` stands for kinds not measured.
        bytes_per_s: of messages.
        message_s: of one message, whatever its length.
        slowdown: of operations, for processes that share cores.
    """

    coefficients: Mapping[Kind, Coefficients]
    bytes_per_s: float
    message_s: float = 0.0
    slowdown: float = 1.0

    @classmethod
    def fitted(cls, samples: Sequence[Sample], bytes_per_s: float) -> Self:
        """Return times that fit samples, with coefficients that are not negative."""
        kinds = {sample.kind: [other for other in samples if other.kind == sample.kind] for sample in samples}
        for _, direction in list(kinds):
            kinds[ANY, direction] = [sample for sample in samples if sample.kind[1] == direction]
        return cls(coefficients={kind: _fit(found) for kind, found in kinds.items()}, bytes_per_s=bytes_per_s)

    def calibrated(self, measured: Sequence[tuple[PlacedNetwork, float]]) -> Self:
        """Return these times with the message's time and the slowdown that explain measured steps best."""

        def relative_errors(logarithms: Logarithms) -> list[float]:
            times = self._with_logarithms(logarithms)
            return [math.log(times.step(network) / seconds) for network, seconds in measured]

        bounds = (np.log(_LEAST), np.log(_MOST))
        return self._with_logarithms(least_squares(relative_errors, np.log(_FIRST_GUESS), bounds=bounds).x)

    def step(self, network: PlacedNetwork) -> float:
        """Return the seconds of one step of a network."""
        tasks = step_tasks(
            network.operations, [network.device_of], network.topology, self, batch_size=network.batch_size
        )
        return makespan(tasks)

    @override
    def forward(self, operation: Operation, device: Device) -> float:
        return 0.0 if operation.is_input else self._seconds((operation.kind, "forward"), operation)

    @override
    def backward(self, operation: Operation, device: Device) -> float:
        return self._seconds((operation.kind, "backward"), operation)

    @override
    def update(self, parameters: Sequence[int], device: Device) -> float:
        return self.slowdown * _linear(self.coefficients[UPDATE], len(parameters), sum(parameters))

    @override
    def transfer(self, route: Sequence[Link], nbytes: int) -> float:
        return self.message_s + nbytes / self.bytes_per_s

    def _with_logarithms(self, logarithms: Logarithms) -> Self:
        message_s, slowdown = np.exp(logarithms).tolist()
        return dataclasses.replace(self, message_s=message_s, slowdown=slowdown)

    def _seconds(self, kind: Kind, operation: Operation) -> float:
        known = kind if kind in self.coefficients else (ANY, kind[1])
        return self.slowdown * _linear(self.coefficients[known], operation.flops, operation.nbytes)


def _linear(coefficients: Coefficients, flops: float, nbytes: float) -> float:
    constant, per_flop, per_byte = coefficients
    return constant + per_flop * flops + per_byte * nbytes


def _fit(samples: Sequence[Sample]) -> Coefficients:
    """Least squares with weights 1 / seconds, between those of absolute errors and of relative ones.

    Relative errors alone leave sums too small: what took long by chance weighs little.
    """
    matrix = np.array([(1.0, sample.flops, sample.nbytes) for sample in samples])
    scale = np.maximum(matrix.max(axis=0), 1.0)
    root = np.sqrt([sample.seconds for sample in samples])
    found, _ = nnls(matrix / scale / root[:, None], root)  # scaled, for flops are many and seconds are few
    constant, per_flop, per_byte = (found / scale).tolist()
    return constant, per_flop, per_byte
