"""A device process, which holds a part of one replica and computes when the host commands it.

A replica is a copy of the network. The device's peers hold the same part of the other replicas; a device and its peers
sum their gradients. After the host has sent the device its part of the model, each step has these phases: the host
sends the batch; the device runs forward and backward; with the sync trigger it waits until the host has seen all
devices finish backward; the device averages its gradients with its peers; the host, which knows about all devices, says
whether the step is skipped; the device updates its parameters.

`Stage` is the device's part of the network. Every operation has its own small autograd graph, so the gradient of its
output can come from any device. If several operations use one value, their gradients are added in the order of
autograd's engine: one by one, the last user's first. Losses and gradients are therefore bit for bit those of one
process with as many threads, if torch's rounding does not depend on a tensor's strides: a tensor that another device
sent is always contiguous.
"""

import collections
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import fx, nn
from typing_extensions import override

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.config.syntax import Straggler
from bench.core.processes import peak_rss_bytes
from bench.datasets.base import Task
from bench.extensions.place.assignment import LOSS, Edge, Route, attribute, parameters_of
from bench.extensions.place.messages import (
    HOST_RANK,
    as_dicts,
    from_dicts,
    hear,
    receive_all_,
    receive_tensor,
    send_all,
    send_tensor,
    tell,
)
from bench.optimizers.base import Optimizer
from bench.strategies.base import CommandedRank, SaveState
from collectives.pool import BoundPool
from collectives.transport.base import Pending, Transport, wait_all
from compressors.floats import NoCompression
from compressors.layer import Step
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.exchange.packed_state import bits_hash
from gradwire.exchange.report import StepReport
from gradwire.step_guard import StepGuard


class _Done(NamedTuple):
    """One operation whose forward pass is done.

    Attributes:
        out: the operation's output.
        wants_gradient: True if the output is a tensor that needs a gradient.
        leaves: each input that needs a gradient, detached, by the name of the node that made it.
    """

    out: Any
    wants_gradient: bool
    leaves: Mapping[str, torch.Tensor]


class Stage:
    """Run one device's part of one replica (copy of the network).

    Args:
        route: the replica's devices and the operations on each.
        own: this device's index among the replica's devices.
        transport: connects all processes.
        device: the torch device for tensors.

    Attributes:
        device: the torch device for tensors.
        parameters: this device's trainable parameters by name, in the network's order.
        buffers: the buffers of this device's modules by name, in the network's order.
        takes_input: True if this device receives the mini-batch.
        makes_result: True if this device computes the network's result and the loss.
        sent_bytes: bytes of activations and their gradients that this device has sent so far, by the receiver's rank.
    """

    def __init__(self, route: Route, own: int, transport: Transport, device: torch.device) -> None:
        self._route = route
        self._own = own
        self._nodes = [node for node in route.nodes if route.device_of[node.name] == own]
        names = {name for node in self._nodes for name in parameters_of(node, route.traced)}
        self.parameters = {name: p for name, p in route.traced.named_parameters() if name in names}
        modules = tuple(f"{node.target}." for node in self._nodes if node.op == "call_module")
        self.buffers = {name: b for name, b in route.traced.named_buffers() if name.startswith(modules)}
        self._users = {node.name: route.users(node) for node in self._nodes}
        self._elsewhere = {node.name: route.elsewhere(node) for node in self._nodes}
        self._messages = {peer: route.messages(peer, own) for peer in set(route.device_of.values()) - {own}}
        # Values and gradients that every other device still has to send in this step, in order; and those that have
        # arrived but are not used yet.
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

    def forward(self, x: torch.Tensor | None, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """Run the forward pass of this device's operations, and send other devices the values that they need.

        Args:
            x: the mini-batch; None if another device receives it.
            loss_of: computes the loss from the network's output; called only on the device that computes this output.

        Returns:
            The detached loss; None if another device computes the network's output.
        """
        self._expected = {peer: list(edges) for peer, edges in self._messages.items()}
        self._loss = None
        values: dict[str, tuple[Any, bool]] = {}  # by node: its output, and whether that wants a gradient
        for node in self._nodes:
            inputs, leaves = {}, {}
            for made in node.all_input_nodes:
                if made.name not in values:
                    values[made.name] = self._receive((made.name, ""), self._route.device_of[made.name])
                inputs[made], needs_gradient = values[made.name]
                if needs_gradient:
                    inputs[made] = leaves[made.name] = inputs[made].detach().requires_grad_()
            out = self._run(node, inputs, x)
            wants_gradient = isinstance(out, torch.Tensor) and out.requires_grad
            self._done[node.name] = _Done(out, wants_gradient, leaves)
            values[node.name] = (out, wants_gradient)
            for home in self._elsewhere[node.name]:
                self._send(out, home, wants_gradient=wants_gradient)
        if not self.makes_result:
            return None
        logits = self._done[self._route.result.name].out.detach().requires_grad_()
        self._loss = (loss_of(logits), logits)
        return self._loss[0].detach()

    def backward(self) -> None:
        """Run the backward pass of this device's operations; call this method after `forward`.

        Add to the gradients of this device's parameters. Values that this device received in forward also have
        gradients; send these back to the devices that sent the values.
        """
        parts: dict[Edge, torch.Tensor | None] = {}  # gradients that this device computes for its own values
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
        """Return the gradient of a node's output: the sum of its users' gradients, beginning with the last user.

        Return None if no user has a gradient.

        Args:
            node: the node.
            parts: gradients from users on this device, by (name of the node, name of the user); gradients that are
                summed are removed. Gradients from users on other devices are received.
        """
        total = None
        for user in self._users[node.name]:
            home, edge = self._route.home[user], (node.name, user)
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

        Each value or gradient can be received only once.

        Args:
            edge: names the value or gradient.
            peer: index of the sending device among the replica's devices.

        Returns:
            (the tensor, or None; True if the sender wants the tensor's gradient)
        """
        while edge not in self._arrived:
            arriving = self._expected[peer].pop(0)
            with self._transport.counted_as("activation"):
                self._arrived[arriving] = receive_tensor(self._transport, self._route.ranks[peer], self.device)
        return self._arrived.pop(edge)


class DeviceProcess(CommandedRank):
    """Run this process as a device: hold a part of one replica (copy of the network), and obey the host's commands.

    Args:
        config: the run's configuration.
        stage: this device's part of a replica.
        replica: index of the replica.
        channel: connects the devices that hold the same part of all replicas, and sums their gradients.
        transport: connects all processes.
        optimizer: updates this device's parameters.
    """

    def __init__(
        self,
        config: RunConfig,
        stage: Stage,
        replica: int,
        channel: CompressedCommunicator,
        transport: Transport,
        optimizer: Optimizer,
    ) -> None:
        self._config = config
        self._task: Task = spec.build("datasets", config.dataset).task
        self._stage = stage
        self._replica = replica
        self._channel = channel
        self._transport = transport
        self._parameters = list(stage.parameters.values())
        self._buffers = list(stage.buffers.values())
        self._optimizer = (
            optimizer.bind(nn.ParameterList(self._parameters), config.lr, channel) if self._parameters else None
        )
        straggler = Straggler.parse(config.straggler) if config.straggler else None
        self._slowdown = straggler.slowdown if straggler and straggler.rank == transport.rank else 1.0
        # Whether gradients are averaged over replicas.
        self._averages = bool(self._parameters) and channel.transport.world_size > 1 and not optimizer.keeps_gradients
        self._restored: dict[str, Any] | None = None
        self._num_steps = self._num_steps_here = 0
        self._cpu_s: list[float] = []  # CPU seconds of each timed step since the last report
        self._in_pool = self._gradients_in_pool() if self._averages else None

    @override
    def follow(self, save: SaveState) -> None:
        """Carry out the host's commands until it sends "stop".

        Raises:
            TransportError: another process was lost.
            NonFiniteGradient: a gradient was not finite, and the run's option `nonfinite` is "raise".
        """
        while (message := hear(self._transport, HOST_RANK))["command"] != "stop":
            match message["command"]:
                case "load":
                    receive_all_(self._transport, HOST_RANK, [*self._parameters, *self._buffers])
                    self._restore()
                case "checkpoint":
                    save(
                        self._num_steps,
                        {
                            "parameters": self._parameters,
                            "buffers": self._buffers,
                            "optimizer": self._optimizer.state_dict() if self._optimizer is not None else {},
                            "channel": self._channel.state_dict(),
                            "num_steps": self._num_steps,
                            "traffic": as_dicts(self._transport.traffic),
                            "links": dict(self._stage.sent_bytes),
                        },
                    )
                case "batch":
                    self._train(
                        Step(rank=self._replica, world_size=self._config.replicas, **message["step"]), message["lr"]
                    )
                case "report":
                    self._report()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state  # applied after the host's first command, which loads the model

    @override
    def close(self) -> None:
        dist.barrier()  # all processes close at the same time
        self._channel.close()
        dist.barrier()

    @torch.no_grad()
    def _restore(self) -> None:
        """Apply the state that `load_state_dict` got, if any, including the traffic counted until the checkpoint."""
        state = self._restored
        if state is None:
            return
        self._restored = None
        saved = [*state["parameters"], *state["buffers"]]
        for tensor, value in zip([*self._parameters, *self._buffers], saved, strict=True):
            tensor.copy_(value)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        self._channel.load_state_dict(state["channel"])
        self._num_steps = state["num_steps"]
        self._transport.traffic.update(from_dicts(state["traffic"]))
        self._stage.sent_bytes.update(state["links"])

    def _train(self, step: Step, lr: float) -> None:
        cpu_began = time.process_time()
        self._channel.start_step(step)
        self._compute()
        computed = time.perf_counter()
        if self._config.trigger == "sync":
            tell(self._transport, HOST_RANK, {"done": step.index})
            hear(self._transport, HOST_RANK)
        outcome = self._reduce(step)
        reduced_s, exposed_before_s = time.perf_counter() - computed, self._channel.exposed_s
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            if not outcome.skipped:
                self._optimizer.step()
                outcome.add(self._channel.finish_step())
            self._optimizer.zero_grad(set_to_none=self._in_pool is None)
        outcome.exposed_s = reduced_s + self._channel.exposed_s - exposed_before_s  # includes the optimizer's waiting
        report = {name: getattr(outcome, name) or 0.0 for name in ("encode_s", "exchange_s", "exposed_s")}
        encoded = [vars(part) | {"layer": part.layer.id} for part in outcome.encoded if self._replica == 0]
        tell(self._transport, HOST_RANK, report | {"encoded": encoded})
        self._num_steps += 1
        self._num_steps_here += 1
        if self._num_steps_here > self._config.warmup_steps:
            self._cpu_s.append(time.process_time() - cpu_began)

    def _compute(self) -> None:
        """Run forward and backward; the device that computes the loss sends the loss to the host after forward.

        After backward, a straggler sleeps until its step is as slow as configured.
        """
        device = self._stage.device
        x = receive_tensor(self._transport, HOST_RANK, device)[0] if self._stage.takes_input else None
        y = receive_tensor(self._transport, HOST_RANK, device)[0] if self._stage.makes_result else None

        started, waited_before = time.perf_counter(), self._transport.traffic["activation"].seconds
        smoothing = self._config.label_smoothing
        loss = self._stage.forward(x, lambda outputs: self._task.loss(outputs, cast(torch.Tensor, y), smoothing))
        if loss is not None:
            tell(self._transport, HOST_RANK, {"loss": float(loss)})
        self._stage.backward()
        waited = self._transport.traffic["activation"].seconds - waited_before
        time.sleep((self._slowdown - 1) * max(0.0, time.perf_counter() - started - waited))

    def _reduce(self, step: Step) -> StepReport:
        """Replace every parameter's gradient with its mean over replicas, and ask the host whether to skip the step."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        guard = StepGuard(self._config.nonfinite)
        guard.screen_(gradients)
        if self._in_pool is not None:
            self._channel.average_(self._in_pool)
        elif self._averages:
            self._channel.mean_(gradients)
        tell(self._transport, HOST_RANK, {"nonfinite": guard.saw_nonfinite})
        skipped = hear(self._transport, HOST_RANK)["skip"]
        if skipped:
            self._channel.drop()
            guard.skip(f"a gradient was not finite at step {step.index}")
        return StepReport(skipped=skipped, encode_s=0.0, exchange_s=0.0)

    def _gradients_in_pool(self) -> torch.Tensor | None:
        """Place all gradients in memory that the collective `pool` shares, so that devices read them without a copy.

        Return this memory as one flat tensor; None if gradients are compressed or another collective is used.
        """
        pool = self._channel.collective
        if not isinstance(pool, BoundPool) or not isinstance(self._channel.reducer.compressor, NoCompression):
            return None
        sizes = [parameter.numel() for parameter in self._parameters]
        flat = pool.buffer(sum(sizes))
        for parameter, part in zip(self._parameters, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        return flat

    def _report(self) -> None:
        """Send this device's figures, parameters and buffers to the host."""
        figures = {
            "traffic": as_dicts(self._transport.traffic),
            "links": dict(self._stage.sent_bytes),
            "residual_norms": self._channel.residual_norms(),
            "weights": bits_hash(self._parameters),
            "cpu_s_per_step": statistics.fmean(self._cpu_s) if self._cpu_s else None,
            "peak_rss_bytes": peak_rss_bytes(),
            "held_bytes": sum(self._channel.nbytes.values()),
        }
        tell(self._transport, HOST_RANK, figures)
        self._cpu_s.clear()
        if self._replica == 0:
            send_all(self._transport, HOST_RANK, list(self._parameters))
        send_all(self._transport, HOST_RANK, self._buffers)
