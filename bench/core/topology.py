"""Topology: one host, its devices of several roles, and the tree of links that joins them, from a TOML file.

[host]
kind = "cpu"                 # whose figures in the catalogue

[[switch]]
name = "switch0"
link = "cxl2x16"             # the link on the way to the host, a name in the catalogue
to = "host"

[[device]]
role = "gpu"                 # gpu, fpga, asic, dpu or cpu
count = 2                    # gpu0 and gpu1, each with a link of its own
link = "cxl2x16"
to = "switch0"
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from bench.core.errors import UsageError
from bench.core.toml_files import read_toml, refuse_unknown, tables, text, whole_number
from collectives.options import did_you_mean

Role = Literal["gpu", "fpga", "asic", "dpu", "cpu"]
ROLES: tuple[Role, ...] = typing.get_args(Role)
HOST = "host"
MAX_DEVICES = 64

_DEVICE_KEYS = ("role", "count", "kind", "torch_device", "link", "to")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        name: its role and number, "gpu0".
        role: what it is good at.
        kind: whose figures in the catalogue it has.
        torch_device: where its tensors lie, as torch names it.
    """

    name: str
    role: Role
    kind: str
    torch_device: str = "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The link by which a device or switch hangs from another node, on its way to the host.

    Attributes:
        node, to: names of both ends; `to` is the one nearer the host.
        kind: its name in the catalogue.
    """

    node: str
    to: str
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """A host and its devices; links form a tree whose root is the host, so that there is one way between any two.

    Attributes:
        host_kind: whose figures in the catalogue the host has.
        devices: in the order of the file.
        links: one per device and switch.

    Raises:
        UsageError: no device, two nodes of one name, a link to nobody, or links in a circle.
    """

    host_kind: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.devices) <= MAX_DEVICES:
            raise UsageError(f"{len(self.devices)} devices are not possible; describe 1 to {MAX_DEVICES}")
        names = [HOST, *(link.node for link in self.links)]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"two nodes are named '{name}'; give each its own name")
        for link in self.links:
            if link.to not in names:
                raise UsageError(
                    f"the link of {link.node} leads to '{link.to}', which is not there{did_you_mean(link.to, names)}; "
                    "name the host or a switch"
                )
        for link in self.links:
            self._way_to_host(link.node)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a device file.

        Raises:
            UsageError: it cannot be read, or does not describe a topology; the sentence names the file.
        """
        content = read_toml(path, "device file")
        refuse_unknown(content, ("host", "switch", "device"), where=str(path))
        host = content.get("host", {})
        if not isinstance(host, dict):
            raise UsageError(f"{path}: write the host as a table under the heading [host]")
        refuse_unknown(host, ("kind",), where=f"{path}, host")
        links: list[Link] = []
        devices: list[Device] = []
        for number, table in enumerate(tables(content, "switch", where=str(path)), start=1):
            where = f"{path}, switch {number}"
            refuse_unknown(table, ("name", "link", "to"), where=where)
            links.append(_link(table, text(table, "name", None, where=where), where=where))
        for number, table in enumerate(tables(content, "device", where=str(path)), start=1):
            where = f"{path}, device {number}"
            refuse_unknown(table, _DEVICE_KEYS, where=where)
            role = _role(text(table, "role", None, where=where), where=where)
            for _ in range(whole_number(table.get("count", 1), where=f"{where}: count")):
                if len(devices) == MAX_DEVICES:
                    raise UsageError(f"{where}: count makes more than {MAX_DEVICES} devices; give fewer")
                device = Device(
                    name=f"{role}{sum(device.role == role for device in devices)}",
                    role=role,
                    kind=text(table, "kind", role, where=where),
                    torch_device=text(table, "torch_device", "cpu", where=where),
                )
                devices.append(device)
                links.append(_link(table, device.name, where=where))
        try:
            return cls(
                host_kind=text(host, "kind", "cpu", where=f"{path}, host"), devices=tuple(devices), links=tuple(links)
            )
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @property
    def roles(self) -> frozenset[Role]:
        """Roles of which there is a device."""
        return frozenset(device.role for device in self.devices)

    def rank_names(self) -> dict[int, str]:
        """What users call the processes, by their ranks: the host is the first, the devices follow."""
        names = [f"the {HOST}", *(f"device {device.name}" for device in self.devices)]
        return {rank: f"{name} (rank {rank})" for rank, name in enumerate(names)}

    def route(self, source: str, to: str) -> list[Link]:
        """The links on the way between two nodes, in order; none from a node to itself."""
        up, down = self._way_to_host(source), self._way_to_host(to)
        while up and down and up[-1] == down[-1]:
            up.pop()
            down.pop()
        return up + down[::-1]

    def pools(self) -> list[tuple[Device, ...]]:
        """The devices dealt into as many equal groups as every role allows, each in the order of the roles.

        Raises:
            UsageError: a role cannot be dealt evenly.
        """
        number = min(sum(device.role == role for device in self.devices) for role in self.roles)
        groups: list[list[Device]] = [[] for _ in range(number)]
        for role in ROLES:
            members = [device for device in self.devices if device.role == role]
            if len(members) % number:
                raise UsageError(
                    f"{len(members)} devices of role {role} cannot be dealt to {number} equal pools; make their count "
                    f"a multiple of {number}"
                )
            for index, device in enumerate(members):
                groups[index % number].append(device)
        return [tuple(group) for group in groups]

    def to_dict(self) -> dict[str, Any]:
        """The topology as plain values that JSON brings back the same."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The topology of which `to_dict` gave these values.

        Raises:
            UsageError: they are not a topology.
        """
        try:
            return cls(
                host_kind=values["host_kind"],
                devices=tuple(Device(**device) for device in values["devices"]),
                links=tuple(Link(**link) for link in values["links"]),
            )
        except (TypeError, KeyError) as error:
            raise UsageError(f"these are not devices as `bench` writes them ({error})") from None

    def _way_to_host(self, node: str) -> list[Link]:
        link_of = {link.node: link for link in self.links}
        way: list[Link] = []
        while node != HOST:
            if link_of[node] in way:
                circle = " -> ".join([*(link.node for link in way), node])
                raise UsageError(f"links form a circle: {circle}; each must lead nearer to the host")
            way.append(link_of[node])
            node = link_of[node].to
        return way


def _role(name: str, *, where: str) -> Role:
    for role in ROLES:
        if name == role:
            return role
    raise UsageError(f"{where}: there is no role '{name}'{did_you_mean(name, ROLES)}; known are {', '.join(ROLES)}")


def _link(table: Mapping[str, Any], node: str, *, where: str) -> Link:
    kind = text(table, "link", None, where=f"{where} ({node})")
    return Link(node=node, to=text(table, "to", HOST, where=where), kind=kind)
