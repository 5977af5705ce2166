"""`Topology`: the hosts, devices and links that a device file in TOML describes.

A kind is the name of an entry in the catalogue (`bench.extensions.place.catalog`), which holds the speed and other
figures of hosts, devices and links. An example of a device file:

[host]
kind = "cpu"

[[switch]]
name = "switch0"
link = "cxl2x16"             # kind of the link towards the host
to = "host"

[[device]]
role = "gpu"                 # gpu, fpga, asic, dpu or cpu
count = 2                    # gpu0 and gpu1, each with a link of its own
link = "cxl2x16"
to = "switch0"

There may be several hosts, each with a name and with devices; the first host controls the training:

[[host]]
name = "left"

[[host]]
name = "right"

[[device]]
role = "gpu"
link = "cxl2x16"
host = "right"               # or `to`, a switch of that host

[[link]]
from = "right"               # a host or a switch
to = "left"
link = "upi"
"""

import dataclasses
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from bench.core.errors import UsageError
from bench.core.files import read_toml, refuse_unknown, tables, text, whole_number
from collectives.options import did_you_mean, raise_first

Role = Literal["gpu", "fpga", "asic", "dpu", "cpu"]
ROLES: tuple[Role, ...] = typing.get_args(Role)
HOST = "host"
MAX_DEVICES = 64

# Field of a bridge (a `Link` between hosts or switches) -> key in the bridge's table [[link]].
_BRIDGE_KEYS = {"node": "from", "to": "to", "kind": "link"}
_DEVICE_KEYS = ("role", "count", "kind", "torch_device", "link", "host", "to")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """One host, a machine that devices are attached to.

    Attributes:
        name: name that links refer to.
        kind: name of the entry with the host's speed and other figures in `bench.extensions.place.catalog`.
    """

    name: str = HOST
    kind: str = "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device of a host, such as a GPU, that holds a part of the neural network.

    Attributes:
        name: role and number, such as "gpu0".
        role: role of the device, which decides which layers it can run.
        kind: name of the entry with the device's speed and other figures in `bench.extensions.place.catalog`.
        torch_device: the torch device that holds its tensors, such as "cpu" or "cuda:0".
    """

    name: str
    role: Role
    kind: str
    torch_device: str = "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A link between two nodes, which are hosts, switches or devices.

    Attributes:
        node, to: names of the two nodes; `to` is nearer to the host.
        kind: name of the entry with the link's rate and other figures in `bench.extensions.place.catalog`.
    """

    node: str
    to: str
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Hosts, devices and links. Devices and switches form a tree below each host; bridges join the trees.

    Attributes:
        hosts: the hosts; the first host controls the training.
        devices: the devices, in the order of the file.
        links: one link per device and switch, towards its host.
        bridges: additional links between hosts or switches.

    Raises:
        UsageError: there is no device, two nodes have the same name, a link leads to an unknown node, links form a
            circle, or a node is not connected to the first host.
    """

    hosts: tuple[Host, ...] = (Host(),)
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    bridges: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        names = [*(host.name for host in self.hosts), *(link.node for link in self.links)]
        device_names = {device.name for device in self.devices}
        raise_first(
            UsageError,
            (
                not 1 <= len(self.devices) <= MAX_DEVICES,
                f"{len(self.devices)} devices are not possible; describe 1 to {MAX_DEVICES}",
            ),
            *((names.count(name) > 1, f"two nodes are named '{name}'; give each its own name") for name in names),
            *(
                (
                    end not in names,
                    f"the link of {link.node} leads to '{end}', which is not there{did_you_mean(end, names)}; name a "
                    "host or a switch",
                )
                for link in self.links + self.bridges
                for end in (link.node, link.to)
            ),
            *(
                (end in device_names, f"a [[link]] joins {end}, which is a device; let it join hosts or switches")
                for link in self.bridges
                for end in (link.node, link.to)
            ),
        )
        for link in self.links:
            self._host_of(link.node)
        for name in names:
            self.route(self.host, name)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a device file.

        Raises:
            UsageError: the file cannot be read, or does not describe a topology; the message names the file.
        """
        content = read_toml(path, "device file")
        refuse_unknown(content, ("host", "switch", "device", "link"), where=str(path))
        hosts = _hosts(path, content)
        devices: list[Device] = []
        links = [
            _link(table, text(table, "name", None, where=where), hosts, where=where)
            for where, table in _tables(path, content, "switch", ("name", "link", "host", "to"))
        ]
        for where, table in _tables(path, content, "device", _DEVICE_KEYS):
            role = text(table, "role", None, where=where)
            if role not in ROLES:
                raise UsageError(
                    f"{where}: there is no role '{role}'{did_you_mean(role, ROLES)}; known are {', '.join(ROLES)}"
                )
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
                links.append(_link(table, device.name, hosts, where=where))
        bridges = tuple(
            Link(**{field: text(table, key, None, where=where) for field, key in _BRIDGE_KEYS.items()})
            for where, table in _tables(path, content, "link", _BRIDGE_KEYS.values())
        )
        try:
            return cls(hosts=hosts, devices=tuple(devices), links=tuple(links), bridges=bridges)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @property
    def host(self) -> str:
        """Return the name of the host that controls the training and distributes the data."""
        return self.hosts[0].name

    @property
    def roles(self) -> frozenset[Role]:
        """Return the roles that at least one device has."""
        return frozenset(device.role for device in self.devices)

    def rank_names(self) -> tuple[str, ...]:
        """Return each process's name in messages, by rank: rank 0 is the controlling host, then come the devices."""
        of_devices = (f"device {device.name} (rank {rank})" for rank, device in enumerate(self.devices, start=1))
        return (f"the {HOST} (rank 0)", *of_devices)

    def route(self, source: str, to: str) -> list[Link]:
        """Return the links of the shortest route from one node to another, in order.

        If several routes have equally few links, the file's order decides.

        Raises:
            UsageError: no links connect the nodes.
        """
        routes: dict[str, list[Link]] = {source: []}
        nodes = [source]
        for node in nodes:  # breadth first; the list grows meanwhile
            for link in self.links + self.bridges:
                if node in (link.node, link.to):
                    other = link.to if node == link.node else link.node
                    if other not in routes:
                        routes[other] = [*routes[node], link]
                        nodes.append(other)
        if to not in routes:
            raise UsageError(f"no link joins {to} to {source}; add one under the heading [[link]]")
        return routes[to]

    def pools(self) -> list[tuple[Device, ...]]:
        """Divide the devices into pools (groups that can each hold one copy of the network), and return the pools.

        A host's devices make as many pools as there are devices of its rarest role; each pool has equally many devices
        of every role.

        Raises:
            UsageError: the devices of a role cannot be divided evenly, or pools differ between hosts.
        """
        groups: list[list[Device]] = []
        for host in self.hosts:
            groups += _equal_groups([device for device in self.devices if self._host_of(device.name) == host.name])
        first, *others = [[device.role for device in group] for group in groups]
        if other := next((roles for roles in others if roles != first), None):
            raise UsageError(
                "devices are divided into groups that hold one copy of the model each, and the groups must be equal: "
                f"one has {', '.join(first)}, another {', '.join(other)}; give every host the same devices"
            )
        return [tuple(group) for group in groups]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the topology that `dataclasses.asdict` turned into `values`, even if the values went through JSON.

        Raises:
            UsageError: the values do not describe a topology.
        """
        try:
            return cls(
                hosts=tuple(Host(**host) for host in values["hosts"]),
                devices=tuple(Device(**device) for device in values["devices"]),
                links=tuple(Link(**link) for link in values["links"]),
                bridges=tuple(Link(**link) for link in values["bridges"]),
            )
        except (TypeError, KeyError) as error:
            raise UsageError(f"these are not devices as `bench` writes them to config.json ({error})") from None

    def _host_of(self, node: str) -> str:
        """Return the name of the host that a node's link leads to, directly or over switches.

        Raises:
            UsageError: the links form a circle.
        """
        end_of = {link.node: link.to for link in self.links}
        way = [node]
        while next_node := end_of.get(way[-1]):
            way.append(next_node)
            if way.count(next_node) > 1:
                raise UsageError(f"links form a circle: {' -> '.join(way)}; each must lead nearer to a host")
        return way[-1]


def _equal_groups(devices: Sequence[Device]) -> list[list[Device]]:
    counts = {role: sum(device.role == role for device in devices) for role in ROLES}
    number = min((count for count in counts.values() if count), default=0)
    groups: list[list[Device]] = [[] for _ in range(number)]
    for role, count in counts.items():
        if number and count % number:
            raise UsageError(
                f"{count} devices of role {role} cannot be divided into {number} equal groups, each for one "
                f"copy of the model; make their count a multiple of {number}"
            )
        for index, device in enumerate(device for device in devices if device.role == role):
            groups[index % number].append(device)
    return groups


def _hosts(path: Path, content: Mapping[str, Any]) -> tuple[Host, ...]:
    """Return the hosts that a file describes in one table [host] or in tables [[host]]; by default one host "cpu"."""
    found = content.get("host", {})
    if isinstance(found, dict):
        refuse_unknown(found, ("kind",), where=f"{path}, host")
        return (Host(kind=text(found, "kind", "cpu", where=f"{path}, host")),)
    if not (isinstance(found, list) and all(isinstance(table, dict) for table in found)):
        raise UsageError(f"{path}: write the host as a table under the heading [host], several under [[host]]")
    default_name = HOST if len(found) == 1 else None
    return tuple(
        Host(name=text(table, "name", default_name, where=where), kind=text(table, "kind", "cpu", where=where))
        for where, table in _tables(path, content, "host", ("name", "kind"))
    )


def _tables(
    path: Path, content: Mapping[str, Any], name: str, keys: Collection[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield, for each table [[name]] in a file, its place for error messages, and its content; refuse unknown keys."""
    for number, table in enumerate(tables(content, name, where=str(path)), start=1):
        where = f"{path}, {name} {number}"
        refuse_unknown(table, keys, where=where)
        yield where, table


def _link(table: Mapping[str, Any], node: str, hosts: Sequence[Host], *, where: str) -> Link:
    kind = text(table, "link", None, where=f"{where} ({node})")
    if "host" not in table:
        return Link(node=node, to=text(table, "to", hosts[0].name, where=where), kind=kind)
    if "to" in table:
        raise UsageError(f"{where}: 'host' and 'to' both say where the link of {node} leads; give one of them")
    host, names = text(table, "host", None, where=where), [host.name for host in hosts]
    if host not in names:
        raise UsageError(f"{where}: there is no host '{host}'{did_you_mean(host, names)}; known are {', '.join(names)}")
    return Link(node=node, to=host, kind=kind)
