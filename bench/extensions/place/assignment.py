"""Trace a network, assign each operation to a device by the operation's kind, and plan which rank is which device."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import fx, nn

from bench.core.errors import UsageError
from bench.extensions.place.messages import HOST_RANK
from bench.extensions.place.topology import Device, Role, Topology

Work = Literal["matrix", "convolution", "activation", "other"]

# Activation modules are recognised by class, functions and methods by name: `leaky_relu` does what `LeakyReLU` does.
_ACTIVATIONS = tuple(name for name in nn.modules.activation.__all__ if name != "MultiheadAttention")
_MODULES: Mapping[Work, tuple[type[nn.Module], ...]] = {
    "matrix": (nn.Linear, nn.Bilinear),
    "convolution": (nn.modules.conv._ConvNd,),
    "activation": tuple(getattr(nn, name) for name in _ACTIVATIONS),
}
_ACTIVATION_NAMES = frozenset(name.lower() for name in _ACTIVATIONS)
_MATRIX_NAMES = frozenset(["linear", "bilinear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "einsum"])


def work_of(node: fx.Node, traced: fx.GraphModule) -> Work:
    """Return the kind of operation of a node in a traced network."""
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        return next((work for work, classes in _MODULES.items() if isinstance(module, classes)), "other")
    if node.op not in ("call_function", "call_method"):
        return "other"
    name = getattr(node.target, "__name__", str(node.target)).strip("_").replace("_", "")
    if name.startswith("conv"):
        return "convolution"
    return "matrix" if name in _MATRIX_NAMES else "activation" if name in _ACTIVATION_NAMES else "other"


# Key in a node's `meta`; the value is the input that the original code changed in place at this node.
IN_PLACE = "changed in place"


def trace(model: nn.Module) -> fx.GraphModule:
    """Trace a network with torch.fx, and replace in-place operations with operations that make a new tensor.

    The modules in the traced network are copies that share the parameters and buffers of `model`.

    Raises:
        UsageError: the network cannot be traced, for example because it branches on the values of its input.
    """
    # modules are copied, tensors are not
    shared = copy.deepcopy(model, memo={id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    in_place = {name for name, module in shared.named_modules() if getattr(module, "inplace", False)}
    for name in in_place:
        setattr(shared.get_submodule(name), "inplace", False)  # noqa: B010 - modules in general declare no such attribute
    try:
        traced = fx.symbolic_trace(shared)
    except Exception as error:  # noqa: BLE001 - tracing runs the network's own code, which may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UsageError(
            f"the model cannot be traced ({reason}), so its layers cannot be placed by type; use "
            "--strategy ddp, or a model without branches that depend on values"
        ) from None
    before: set[fx.Node] = set()
    for node in traced.graph.nodes:
        before.add(node)
        if (node.op == "call_module" and node.target in in_place) or _rewritten(node):
            node.meta[IN_PLACE] = changed = node.all_input_nodes[0]
            changed.replace_all_uses_with(node, delete_user_cb=lambda user: user not in before)
    traced.recompile()
    return traced


def _rewritten(node: fx.Node) -> bool:
    """Make an in-place function or method return a new tensor instead; return True if the node was in place."""
    if node.kwargs.get("inplace"):
        node.update_kwarg("inplace", False)
        return True
    if node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).startswith("_"):
        node.target = str(node.target).removesuffix("_")
        return True
    return False


def parameters_of(node: fx.Node, traced: fx.GraphModule) -> list[str]:
    """Return the names of the trainable parameters that a node reads.

    A parameter that several modules share is named as in the first of these modules.
    """
    read: list[torch.Tensor | None] = [attribute(traced, str(node.target))] if node.op == "get_attr" else []
    if node.op == "call_module":
        read = list(traced.get_submodule(str(node.target)).parameters())
    return [name for name, p in traced.named_parameters() if p.requires_grad and any(p is tensor for tensor in read)]


def attribute(traced: fx.GraphModule, path: str) -> torch.Tensor | None:
    """Return the tensor at a path such as "layer.weight"; None if that attribute is not a tensor."""
    owner, _, name = path.rpartition(".")
    value = getattr(traced.get_submodule(owner), name)
    return value if isinstance(value, torch.Tensor) else None


ActivationPolicy = Literal["asic", "dpu", "turns", "producer"]

# Roles for each kind of work, best first: if the pool has no device of a role, the next role in the list does the work.
_CHAINS: Mapping[str, tuple[Role, ...]] = {
    "matrix": ("gpu", "cpu", "asic", "dpu", "fpga"),
    "convolution": ("fpga", "gpu", "cpu", "asic", "dpu"),
    "asic": ("asic", "dpu", "gpu", "cpu", "fpga"),
    "dpu": ("dpu", "asic", "gpu", "cpu", "fpga"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """The device of every node in a traced network.

    Attributes:
        device_of: name of the device, by node name, for every node except the output.
        notes: one sentence for each kind of operation whose preferred role (such as "gpu") no device has; it names the
            role that is used instead.
    """

    device_of: Mapping[str, str]
    notes: Sequence[str]


def assign(traced: fx.GraphModule, pool: Sequence[Device], activations: ActivationPolicy = "asic") -> Assignment:
    """Assign every operation to a device of one pool (the devices that together hold one copy of the network).

    Several devices with the same role take the role's operations in round-robin order. A module that is called twice
    stays on one device, and so do all operations that read the same parameter.

    Args:
        traced: the traced network.
        pool: the devices, at least one.
        activations: role of the devices that run activation functions: "asic", "dpu", or "turns" for these two
            alternately; "producer": each activation function runs on the device that makes its input.
    """
    activation_roles = ("asic", "dpu") if activations == "turns" else (activations,)
    num_assigned: collections.Counter[str] = collections.Counter()
    notes: list[str] = []

    def next_device(work: Work) -> str:
        wanted: str = work
        if work == "activation":
            wanted = activation_roles[num_assigned[work] % len(activation_roles)]
            num_assigned[work] += 1
        chain = _CHAINS[wanted]
        role = next(role for role in chain if any(device.role == role for device in pool))
        note = f"there is no {chain[0]} for {work} operations; {role} does them"
        if role != chain[0] and note not in notes:
            notes.append(note)
        members = [device.name for device in pool if device.role == role]
        num_assigned[role] += 1
        return members[(num_assigned[role] - 1) % len(members)]

    device_of: dict[str, str] = {}
    home: dict[str, str] = {}  # device of each parameter, and of each module that is called
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    for node in nodes:
        keys = [f"module {node.target}"] if node.op == "call_module" else []
        keys += parameters_of(node, traced)
        device = next((home[key] for key in keys if key in home), "")
        work = work_of(node, traced)
        if not device and work != "other" and (work != "activation" or activations != "producer"):
            device = next_device(work)
        device_of[node.name] = device or _beside(node.all_input_nodes, device_of, default="")
        home.update((key, device_of[node.name]) for key in keys if device_of[node.name])
    for node in reversed(nodes):  # inputs and parameters have no producer, so they are placed where they are used
        device_of[node.name] = device_of[node.name] or _beside(node.users, device_of, default=pool[0].name)
    return Assignment(device_of=device_of, notes=notes)


def _beside(nodes: Iterable[fx.Node], device_of: Mapping[str, str], *, default: str) -> str:
    return next((device_of[node.name] for node in nodes if device_of.get(node.name)), default)


def check_values(traced: fx.GraphModule, inputs: torch.Tensor) -> None:
    """Run the network on the meta device and check that its operations can be placed on different devices.

    Args:
        traced: a network whose tensors lie on the meta device.
        inputs: a batch of input samples, on the meta device.

    Raises:
        UsageError: an operation does not make exactly one tensor, or changes in place a value that other operations use
            too.
    """
    _Checker(traced).run(inputs)


class _Checker(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        if self._changes_shared_memory(n):
            raise UsageError(
                f"the model's operation {n.name} changes in place a value that other layers or its state also use, so "
                "its layers cannot be placed by type; use --strategy ddp, or an operation that makes a new tensor"
            )
        value = super().run_node(n)
        if n.op != "output" and not isinstance(value, torch.Tensor):
            raise UsageError(
                f"the model's operation {n.name} makes a {type(value).__name__} instead of one tensor, so its layers "
                "cannot be placed by type; use --strategy ddp"
            )
        return value

    def _changes_shared_memory(self, n: fx.Node) -> bool:
        """Return True if a node overwrites memory that other values share.

        Later uses of the changed value itself do not count, because `trace` redirects them to the new tensor.
        """
        if n.op == "call_function" and getattr(n.target, "__name__", "").endswith("_"):
            return True
        changed = n.meta.get(IN_PLACE)
        if changed is None or changed.op == "get_attr":
            return changed is not None
        memory = self.env[changed].untyped_storage()._cdata
        sharing = [node for node, value in self.env.items() if value.untyped_storage()._cdata == memory]
        return any(user is not n and user not in self.env for node in sharing for user in node.users)


# What a message holds: the gradient of a value, as (node that makes the value, node that uses it); or the value itself,
# as (node that makes it, "").
Edge = tuple[str, str]

LOSS = "loss"


@dataclasses.dataclass(kw_only=True, eq=False)
class Route:
    """The devices that run the operations of one replica (copy of the network), and the values that they exchange.

    Attributes:
        traced: the whole traced network.
        device_of: index of the device that runs each operation, among the replica's devices; by node name.
        ranks: the ranks of the replica's devices, by index.
        nodes: the operations in the order in which they run.
        result: the operation that makes the network's result.
        home: `device_of`, with an entry `LOSS` for the device that computes the loss.
    """

    traced: fx.GraphModule
    device_of: Mapping[str, int]
    ranks: Sequence[int]

    def __post_init__(self) -> None:
        nodes = list(self.traced.graph.nodes)
        self.nodes: list[fx.Node] = [node for node in nodes if node.op != "output"]
        (self.result,) = (cast(fx.Node, node.args[0]) for node in nodes if node.op == "output")
        self.home = {**self.device_of, LOSS: self.device_of[self.result.name]}

    def users(self, node: fx.Node) -> list[str]:
        """Return the names of the nodes that use a node's value, in reverse order of their execution.

        For the network's result, the list begins with `LOSS`.
        """
        names = {user.name for user in node.users if user.op != "output"}
        in_order = [other.name for other in reversed(self.nodes) if other.name in names]
        return [LOSS, *in_order] if node is self.result else in_order

    def elsewhere(self, node: fx.Node) -> list[int]:
        """Return the indices of the devices that use but do not compute a node's value, in the order of first use."""
        homes = [self.home[user] for user in reversed(self.users(node))]
        return [home for home in dict.fromkeys(homes) if home != self.device_of[node.name]]

    def messages(self, source: int, to: int) -> list[Edge]:
        """Return the names of the values and gradients that device `source` sends to `to` in one step, in this order.

        First come the values that `source` computes in forward, then the gradients of the values that `to` computed.
        An `Edge` is (node that makes the value, node that uses it) for a gradient, and (node, "") for a value.

        Args:
            source: index of the sending device among the replica's devices.
            to: index of the receiving device among the replica's devices.
        """
        nodes = [node for node in self.nodes if self.device_of[node.name] == source]
        values = [(node.name, "") for node in nodes if to in self.elsewhere(node)]
        gradients = [
            (made.name, node.name)
            for node in reversed(nodes)
            for made in node.all_input_nodes
            if self.device_of[made.name] == to
        ]
        return values + gradients


Split = Literal["type", "data", "both"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Map ranks to devices: rank 0 is the host, and the devices follow in the order of the topology.

    Attributes:
        names: names of the host and the devices, by rank.
        pool: the devices that hold the first replica (copy of the network).
        ranks: for each replica, the ranks of its devices. A replica gets one mini-batch per step. Devices at the same
            index hold the same part of the model in every replica.
    """

    names: Mapping[int, str]
    pool: Sequence[Device]
    ranks: Sequence[Sequence[int]]

    @classmethod
    def of(cls, topology: Topology, by: Split) -> Plan:
        """Return the plan for a topology.

        Args:
            topology: the host and the devices.
            by: "type": one replica (copy of the network) over all devices; "data": one replica on each device; "both":
                one replica over each pool of devices; all pools have equally many devices of every role.
        """
        devices = topology.devices
        whole = [devices] if by == "type" else [(device,) for device in devices]
        pools = topology.pools() if by == "both" else whole
        names = dict(enumerate([topology.host, *(device.name for device in devices)], start=HOST_RANK))
        rank_of = {device.name: rank for rank, device in enumerate(devices, start=HOST_RANK + 1)}
        return cls(names=names, pool=pools[0], ranks=[[rank_of[device.name] for device in pool] for pool in pools])

    def assign(self, model: nn.Module, activations: ActivationPolicy) -> tuple[Assignment, list[Route]]:
        """Return the assignment of operations to the first replica's devices, and a `Route` for every replica.

        Raises:
            UsageError: the model cannot be traced.
        """
        traced = trace(model)
        assignment = assign(traced, self.pool, activations)
        index_of = {device.name: index for index, device in enumerate(self.pool)}
        device_of = {node: index_of[name] for node, name in assignment.device_of.items()}
        return assignment, [Route(traced=traced, device_of=device_of, ranks=ranks) for ranks in self.ranks]
