"""Stage: the operations of a network that one device runs, forward and backward, and what it hands to other devices.

Every operation is a little autograd graph of its own, so its output's gradient can come from anywhere. Where several
operations use one value, their gradients are added as autograd's engine adds them: one by one, the last user's first.
Losses and gradients are therefore bit for bit those of one process with as many threads, where torch rounds alike
whatever a tensor's strides: what passes from device to device arrives contiguous.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from bench.strategies.placed.assignment import attribute, parameters_of
from bench.strategies.placed.messages import receive_tensor, send_tensor
from collectives.transport.base import Pending, Transport, wait_all

Edge = tuple[str, str]
"""(node that makes a value, node that uses it); "" as the user of a value that is on its way forward"""

LOSS = "loss"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """Where the operations of one replica run.

    Attributes:
        traced: the whole network.
        device_of: index of the device within its pool, by node name.
        ranks: of the pool's devices.
    """

    traced: fx.GraphModule
    device_of: Mapping[str, int]
    ranks: Sequence[int]

    @property
    def nodes(self) -> list[fx.Node]:
        """The operations in the order in which they run."""
        return [node for node in self.traced.graph.nodes if node.op != "output"]

    @property
    def result(self) -> fx.Node:
        """What makes the network's result."""
        (output,) = (node for node in self.traced.graph.nodes if node.op == "output")
        (result,) = output.args
        assert isinstance(result, fx.Node)
        return result

    def users(self, node: fx.Node) -> list[str]:
        """Names of a value's users, the last one first; the loss uses the result after everything else."""
        names = {user.name for user in node.users if user.op != "output"}
        in_order = [other.name for other in reversed(self.nodes) if other.name in names]
        return [LOSS, *in_order] if node is self.result else in_order

    def home(self, user: str) -> int:
        """Index of the device on which a node, or the loss, is computed."""
        return self.device_of[self.result.name if user == LOSS else user]

    def elsewhere(self, node: fx.Node) -> list[int]:
        """Other devices that use a value, in the order of their first use."""
        homes = [self.home(user) for user in reversed(self.users(node))]
        return [home for home in dict.fromkeys(homes) if home != self.device_of[node.name]]

    def messages(self, source: int, to: int) -> list[Edge]:
        """What one device sends to another in a step, in order: values as it makes them, then gradients likewise."""
        nodes = [node for node in self.nodes if self.device_of[node.name] == source]
        values = [(node.name, "") for node in nodes if to in self.elsewhere(node)]
        gradients = [
            (made.name, node.name)
            for node in reversed(nodes)
            for made in node.all_input_nodes
            if self.device_of[made.name] == to
        ]
        return values + gradients


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Done:
    """One operation that ran forward.

    Attributes:
        out: what it made.
        leaves: by the node that made it, each input whose gradient is wanted, cut off from what made it.
    """

    out: Any
    leaves: Mapping[str, torch.Tensor]

    @property
    def wants_gradient(self) -> bool:
        return isinstance(self.out, torch.Tensor) and self.out.requires_grad


class Stage:
    """One device's part of one replica.

    Args:
        route: where all operations run.
        own: this device's index in its pool.
        transport: between all processes.
        device: where tensors shall lie.

    Attributes:
        device: where tensors lie.
        takes_input, makes_result: the mini-batch comes here, the loss is computed here.
        sent_bytes: of activations and their gradients so far, by the rank that they went to.
    """

    def __init__(self, route: Route, own: int, transport: Transport, device: torch.device) -> None:
        self._route = route
        self._own = own
        self._nodes = [node for node in route.nodes if route.device_of[node.name] == own]
        self._users = {node.name: route.users(node) for node in self._nodes}
        self._elsewhere = {node.name: route.elsewhere(node) for node in self._nodes}
        self._messages = {peer: route.messages(peer, own) for peer in set(route.device_of.values()) - {own}}
        self._transport = transport
        self.device = device
        self._pending: list[Pending] = []
        self._done: dict[str, _Done] = {}
        self._loss: tuple[torch.Tensor, torch.Tensor] | None = None
        self.takes_input = any(node.op == "placeholder" for node in self._nodes)
        self.makes_result = route.device_of[route.result.name] == own
        self.sent_bytes: collections.Counter[int] = collections.Counter()

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters that lie here, by their names in the network and in its order."""
        names = {name for node in self._nodes for name in parameters_of(node, self._route.traced)}
        return {name: p for name, p in self._route.traced.named_parameters() if name in names}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of the modules that lie here, likewise."""
        modules = tuple(f"{node.target}." for node in self._nodes if node.op == "call_module")
        return {name: b for name, b in self._route.traced.named_buffers() if name.startswith(modules)}

    def forward(self, x: torch.Tensor | None, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """Run this device's operations.

        Args:
            x: the mini-batch where this device takes it.
            loss_of: the network's result -> the loss; called where the result is made.

        Returns:
            The loss, detached, where the result is made.
        """
        self._inbox = _Inbox(self._transport, self._route.ranks, self._messages, self.device)
        self._loss = None
        values: dict[str, tuple[Any, bool]] = {}  # by node: what it made, and whether that wants a gradient
        for node in self._nodes:
            inputs, leaves = {}, {}
            for made in node.all_input_nodes:
                if made.name not in values:
                    values[made.name] = self._inbox.take((made.name, ""), self._route.device_of[made.name])
                inputs[made], wants_gradient = values[made.name]
                if wants_gradient:
                    inputs[made] = leaves[made.name] = inputs[made].detach().requires_grad_()
            done = _Done(out=x if node.op == "placeholder" else self._run(node, inputs), leaves=leaves)
            self._done[node.name] = done
            values[node.name] = (done.out, done.wants_gradient)
            for home in self._elsewhere[node.name]:
                self._send(done.out, home, wants_gradient=done.wants_gradient)
        if not self.makes_result:
            return None
        logits = self._done[self._route.result.name].out.detach().requires_grad_()
        self._loss = (loss_of(logits), logits)
        return self._loss[0].detach()

    def backward(self) -> None:
        """Add this device's gradients to those of its parameters, and hand on what others need; after `forward`."""
        parts: dict[Edge, torch.Tensor | None] = {}  # gradients that were made here, of values made here
        if self._loss is not None:
            loss, logits = self._loss
            loss.backward()
            parts[self._route.result.name, LOSS] = logits.grad
        self._inbox.leave_out({name for name, done in self._done.items() if not done.wants_gradient})
        for node in reversed(self._nodes):
            done = self._done.pop(node.name)
            if done.wants_gradient:
                gradient = self._summed(node, parts)
                if gradient is not None:
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

    def _run(self, node: fx.Node, inputs: Mapping[fx.Node, Any]) -> Any:
        args = fx.node.map_arg(node.args, inputs.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, inputs.__getitem__)
        if node.op == "call_module":
            return self._route.traced.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "get_attr":
            return attribute(self._route.traced, str(node.target))
        function = node.target if callable(node.target) else getattr(torch.Tensor, node.target)
        return function(*args, **kwargs)

    def _summed(self, node: fx.Node, parts: dict[Edge, torch.Tensor | None]) -> torch.Tensor | None:
        """The gradient of what a node made: the sum over its users, the last one first."""
        total = None
        for user in self._users[node.name]:
            home, edge = self._route.home(user), (node.name, user)
            part = parts.pop(edge) if home == self._own else self._inbox.take(edge, home)[0]
            if part is not None:
                total = part if total is None else total + part
        return total

    def _send(self, value: torch.Tensor | None, home: int, *, wants_gradient: bool = False) -> None:
        rank = self._route.ranks[home]
        with self._transport.counted_as("activation"):
            pending, nbytes = send_tensor(self._transport, value, rank, wants_gradient=wants_gradient)
        self._pending += pending
        self.sent_bytes[rank] += nbytes


class _Inbox:
    """What other devices send in one step: read in the order in which they send, handed out in the order of need."""

    def __init__(
        self, transport: Transport, ranks: Sequence[int], messages: Mapping[int, list[Edge]], device: torch.device
    ) -> None:
        self._transport = transport
        self._ranks = ranks
        self._expected = {peer: collections.deque(edges) for peer, edges in messages.items()}
        self._arrived: dict[Edge, tuple[torch.Tensor | None, bool]] = {}
        self._device = device

    def leave_out(self, made: set[str]) -> None:
        """No gradients come of these values: they want none."""
        for peer, edges in self._expected.items():
            self._expected[peer] = collections.deque(edge for edge in edges if edge[1] == "" or edge[0] not in made)

    def take(self, edge: Edge, peer: int) -> tuple[torch.Tensor | None, bool]:
        """The value or gradient of an edge, once, and whether a gradient is wanted back; waits for it."""
        while edge not in self._arrived:
            arriving = self._expected[peer].popleft()
            with self._transport.counted_as("activation"):
                self._arrived[arriving] = receive_tensor(self._transport, self._ranks[peer], self._device)
        return self._arrived.pop(edge)
