"""A network run node by node in one process, forward and backward, each node timed by itself."""

from __future__ import annotations

import collections
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from typing_extensions import override

from bench.extensions.place.calibration import UPDATE, Kind, Sample
from bench.extensions.place.operations import Operation

T = TypeVar("T")

WARM_UP = 5
PARAMETERS = ""


def measure(traced: fx.GraphModule, operations: Sequence[Operation], x: torch.Tensor, repeats: int) -> list[Sample]:
    """Return the median time of every operation, forward and backward, and of the update of all parameters.

    It is the time of this thread on its core, for what other processes take is not the operation's; torch must have
    been told to use one thread.

    Args:
        traced: the network, with real parameters, which stay as they are.
        operations: its operations, of a mini-batch like `x`.
        x: a mini-batch.
        repeats: steps that count, after a few that do not.
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
        seconds: of every step, by node and kind.
    """

    def __init__(self, traced: fx.GraphModule, kinds: Mapping[str, str]) -> None:
        super().__init__(traced)
        self.seconds: dict[tuple[str, Kind], list[float]] = collections.defaultdict(list)
        self._kinds = kinds
        self._done: list[tuple[fx.Node, Any, dict[str, torch.Tensor]]] = []

    def timed(self, name: str, kind: Kind, work: Callable[[], T]) -> T:
        """Do something, and note how long its thread ran for it."""
        start = time.thread_time()
        result = work()
        self.seconds[name, kind].append(time.thread_time() - start)
        return result

    @override
    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        inputs = {node: _cut_off(self.env[node]) for node in n.all_input_nodes}
        args = fx.node.map_arg(n.args, inputs.__getitem__)
        kwargs = fx.node.map_arg(n.kwargs, inputs.__getitem__)
        work = functools.partial(getattr(self, n.op), n.target, args, kwargs)
        value = self.timed(n.name, (self._kinds[n.name], "forward"), work)
        self._done.append((n, value, {node.name: leaf for node, leaf in inputs.items() if _wants_gradient(leaf)}))
        return value

    def run_backward(self) -> None:
        """Run every node's backward pass, the last first; the network's result has a small constant gradient."""
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
        total = torch.full_like(value, 1e-3) if not parts else parts[0]
        for part in parts[1:]:
            total = total + part
        torch.autograd.backward([value], [total])


def _cut_off(value: Any) -> Any:
    return value.detach().requires_grad_() if _wants_gradient(value) else value


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
