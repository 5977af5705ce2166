"""A stage: the operations of a network that one device runs, forward and backward, and what it sends to other devices.

Every operation has its own small autograd graph, so the gradient of its output can come from any device. If several
operations use one value, their gradients are added in the order of autograd's engine: one by one, the last user's
first. Losses and gradients are therefore bit for bit those of one process with as many threads, provided that torch's
rounding does not depend on a tensor's strides: tensors that pass from device to device arrive contiguous.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from bench.strategies.placed.assignment import LOSS, Edge, Route, attribute, parameters_of
from bench.strategies.placed.messages import receive_tensor, send_tensor
from collectives.transport.base import Pending, Transport, wait_all


@dataclasses.dataclass(frozen=True, eq=False)
class _Done:
    """One operation that has run forward.

    Attributes:
        out: the operation's output.
        leaves: each input that needs a gradient, detached, by the name of the node that made it.
    """

    out: Any
    leaves: Mapping[str, torch.Tensor]

    @property
    def wants_gradient(self) -> bool:
        return isinstance(self.out, torch.Tensor) and self.out.requires_grad


class Stage:
    """Run one device's part of one replica.

    Args:
        route: the replica's devices and the operations on each.
        own: this device's index in its pool.
        transport: connects all processes.
        device: the torch device for tensors.

    Attributes:
        device: the torch device for tensors.
        takes_input: True if this device receives the mini-batch.
        makes_result: True if this device computes the network's result and the loss.
        sent_bytes: bytes of activations and their gradients that this device has sent so far, by the receiver's rank.
    """

    def __init__(self, route: Route, own: int, transport: Transport, device: torch.device) -> None:
        self._route = route
        self._own = own
        self._nodes = [node for node in route.nodes if route.device_of[node.name] == own]
        self._users = {node.name: route.users(node) for node in self._nodes}
        self._elsewhere = {node.name: route.elsewhere(node) for node in self._nodes}
        self._messages = {peer: route.messages(peer, own) for peer in set(route.device_of.values()) - {own}}
        # What other devices still send in this step, in their order, and what has arrived and is not yet used.
        self._expected: dict[int, list[Edge]] = {}
        self._arrived: dict[Edge, tuple[torch.Tensor | None, bool]] = {}
        self._transport = transport
        self.device = device
        self._pending: list[Pending] = []
        self._done: dict[str, _Done] = {}
        self._loss: tuple[torch.Tensor, torch.Tensor] | None = None
        self.takes_input = any(node.op == "placeholder" for node in self._nodes)
        self.makes_result = route.device_of[route.result.name] == own
        self.sent_bytes: collections.Counter[int] = collections.Counter()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this device's trainable parameters by name, in the network's order."""
        names = {name for node in self._nodes for name in parameters_of(node, self._route.traced)}
        return {name: p for name, p in self._route.traced.named_parameters() if name in names}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of this device's modules by name, in the network's order."""
        modules = tuple(f"{node.target}." for node in self._nodes if node.op == "call_module")
        return {name: b for name, b in self._route.traced.named_buffers() if name.startswith(modules)}

    def forward(self, x: torch.Tensor | None, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """Run this device's operations, and send other devices the values that they need.

        Args:
            x: the mini-batch; None if another device takes it.
            loss_of: computes the loss from the network's result; called on the device that makes the result.

        Returns:
            The detached loss; None if another device makes the result.
        """
        self._expected = {peer: list(edges) for peer, edges in self._messages.items()}
        self._loss = None
        values: dict[str, tuple[Any, bool]] = {}  # by node: its output, and whether that wants a gradient
        for node in self._nodes:
            inputs, leaves = {}, {}
            for made in node.all_input_nodes:
                if made.name not in values:
                    values[made.name] = self._receive((made.name, ""), self._route.device_of[made.name])
                inputs[made], wants_gradient = values[made.name]
                if wants_gradient:
                    inputs[made] = leaves[made.name] = inputs[made].detach().requires_grad_()
            self._done[node.name] = done = _Done(self._run(node, inputs, x), leaves)
            values[node.name] = (done.out, done.wants_gradient)
            for home in self._elsewhere[node.name]:
                self._send(done.out, home, wants_gradient=done.wants_gradient)
        if not self.makes_result:
            return None
        logits = self._done[self._route.result.name].out.detach().requires_grad_()
        self._loss = (loss_of(logits), logits)
        return self._loss[0].detach()

    def backward(self) -> None:
        """Add to the parameters' gradients, and send other devices the gradients of their values.

        Call this method after `forward`.
        """
        parts: dict[Edge, torch.Tensor | None] = {}  # gradients made on this device for values made on it
        if self._loss is not None:
            loss, logits = self._loss
            loss.backward()
            parts[self._route.result.name, LOSS] = logits.grad
        without_gradient = {name for name, done in self._done.items() if not done.wants_gradient}
        for peer, edges in self._expected.items():
            self._expected[peer] = [edge for edge in edges if edge[1] == "" or edge[0] not in without_gradient]
        for node in reversed(self._nodes):
            done = self._done.pop(node.name)
            if done.wants_gradient and (gradient := self._summed(node, parts)) is not None:
                torch.autograd.backward([done.out], [gradient])
            for made, leaf in done.leaves.items():
                home = self._route.device_of[made]
                if home == self._own:
                    parts[made, node.name] = leaf.grad
                else:
                    self._send(leaf.grad, home)
        with self._transport.counted_as("activation"):
            wait_all(self._pending)
        self._pending = []

    def _run(self, node: fx.Node, inputs: Mapping[fx.Node, Any], x: torch.Tensor | None) -> Any:
        match node.op:
            case "placeholder":
                return x
            case "get_attr":
                return attribute(self._route.traced, str(node.target))
            case "call_module":
                function: Any = self._route.traced.get_submodule(str(node.target))
            case _:
                function = node.target if callable(node.target) else getattr(torch.Tensor, node.target)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
        return function(*args, **kwargs)

    def _summed(self, node: fx.Node, parts: dict[Edge, torch.Tensor | None]) -> torch.Tensor | None:
        """Return the gradient of a node's output: the sum of its users' gradients, the last user's first.

        None if no user has a gradient.
        """
        total = None
        for user in self._users[node.name]:
            home, edge = self._route.home(user), (node.name, user)
            part = parts.pop(edge) if home == self._own else self._receive(edge, home)[0]
            if part is not None:
                total = part if total is None else total + part
        return total

    def _send(self, value: torch.Tensor | None, home: int, *, wants_gradient: bool = False) -> None:
        rank = self._route.ranks[home]
        with self._transport.counted_as("activation"):
            pending, nbytes = send_tensor(self._transport, value, rank, wants_gradient=wants_gradient)
        self._pending += pending
        self.sent_bytes[rank] += nbytes

    def _receive(self, edge: Edge, peer: int) -> tuple[torch.Tensor | None, bool]:
        """Wait for a value or gradient from another device, and return it.

        Each can be received only once.

        Args:
            edge: the value or gradient.
            peer: index of the sending device in the pool.

        Returns:
            (the tensor, or None; True if the sender wants the tensor's gradient)
        """
        while edge not in self._arrived:
            arriving = self._expected[peer].pop(0)
            with self._transport.counted_as("activation"):
                self._arrived[arriving] = receive_tensor(self._transport, self._route.ranks[peer], self.device)
        return self._arrived.pop(edge)
