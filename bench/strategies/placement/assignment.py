"""Which device of a pool runs which operation: by type, and the rest beside what produces its input.

Source: the patent on a heterogeneous training system (2022-11), paragraphs 8 and 39-42: fully connected layers on the
GPU, convolutions on the FPGA, activations on ASIC and/or DPU.
Differs: it says nothing of normalisation, pooling, sums and reshapes; they stay where their first input is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch import fx

from bench.core.topology import Device, Role
from bench.strategies.placement.operations import Work, work_of
from bench.strategies.placement.tracing import parameters_of

ActivationPolicy = Literal["asic", "dpu", "turns", "producer"]

# Where a role is missing, the next one does its work.
_CHAINS: Mapping[str, tuple[Role, ...]] = {
    "matrix": ("gpu", "cpu", "asic", "dpu", "fpga"),
    "convolution": ("fpga", "gpu", "cpu", "asic", "dpu"),
    "asic": ("asic", "dpu", "gpu", "cpu", "fpga"),
    "dpu": ("dpu", "asic", "gpu", "cpu", "fpga"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """Where every node of a graph runs.

    Attributes:
        device_of: the device's name, by node name, for every node but the output.
        notes: what runs elsewhere than its type asks for, and why: one sentence each.
    """

    device_of: Mapping[str, str]
    notes: Sequence[str]


def assign(traced: fx.GraphModule, pool: Sequence[Device], activations: ActivationPolicy = "asic") -> Assignment:
    """Place every operation on a device of one pool.

    Several devices of one role take its operations in turns; a module that is called twice stays on one device, and so
    do all operations that read one parameter.

    Args:
        traced: the network.
        pool: devices, at least one.
        activations: the role for activations: asic, dpu, or both in turns; producer: each stays where its input is
            made.
    """
    dealer = _Dealer(pool, activations)
    device_of: dict[str, str] = {}
    home: dict[str, str] = {}  # of parameters, and of modules that are called
    for node in traced.graph.nodes:
        if node.op == "output":
            continue
        keys = [f"module {node.target}"] if node.op == "call_module" else []
        keys += parameters_of(node, traced)
        known = next((home[key] for key in keys if key in home), None)
        work = work_of(node, traced)
        if known is not None:
            device_of[node.name] = known
        elif work != "other" and (work != "activation" or activations != "producer"):
            device_of[node.name] = dealer.next(work)
        else:
            device_of[node.name] = _beside(node.all_input_nodes, device_of, default="")
        home.update((key, device_of[node.name]) for key in keys if device_of[node.name])
    for node in reversed(traced.graph.nodes):  # inputs and parameters have no producer: they go where they are used
        if node.op != "output" and not device_of[node.name]:
            device_of[node.name] = _beside(node.users, device_of, default=pool[0].name)
    return Assignment(device_of=device_of, notes=dealer.notes)


def _beside(nodes: Iterable[fx.Node], device_of: Mapping[str, str], *, default: str) -> str:
    return next((device_of[node.name] for node in nodes if device_of.get(node.name)), default)


class _Dealer:
    """Deals operations to the devices of the role that their type asks for."""

    def __init__(self, pool: Sequence[Device], activations: ActivationPolicy) -> None:
        self._pool = pool
        self._activation_roles = ("asic", "dpu") if activations == "turns" else (activations,)
        self._dealt: dict[str, int] = {}
        self.notes: list[str] = []

    def next(self, work: Work) -> str:
        """Name of the device that takes the next operation of this kind."""
        wanted: str = work
        if work == "activation":
            wanted = self._activation_roles[self._turn("activation") % len(self._activation_roles)]
        chain = _CHAINS[wanted]
        role = next(role for role in chain if any(device.role == role for device in self._pool))
        if (
            role != chain[0]
            and (note := f"there is no {chain[0]} for {work} operations; {role} does them") not in self.notes
        ):
            self.notes.append(note)
        members = [device.name for device in self._pool if device.role == role]
        return members[self._turn(role) % len(members)]

    def _turn(self, what: str) -> int:
        turn = self._dealt.get(what, 0)
        self._dealt[what] = turn + 1
        return turn
