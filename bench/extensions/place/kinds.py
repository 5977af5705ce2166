"""The catalogue: TOML files that describe kinds of devices and links, in `catalog/` and in a user's folder.

The strategy `placed` needs only the names of kinds; `bench place` computes with their figures, such as bandwidths.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from bench.core.errors import UsageError
from bench.core.files import read_toml, refuse_unknown
from bench.extensions.place.topology import Topology
from collectives.options import did_you_mean

SHIPPED = Path(__file__).with_name("catalog")
# The link whose figures are measured on this machine.
SHM = "shm"

# By name: the table of a kind, and where it is written, for messages.
Tables: TypeAlias = dict[str, tuple[Mapping[str, Any], str]]


def folders(own: Path | None = None) -> list[Path]:
    """Return the folders with catalogue files: this package's, the user's (which may not exist), and `own` if given.

    Raises:
        UsageError: `own` contains no TOML file.
    """
    if own is not None and not any(own.glob("*.toml")):
        raise UsageError(f"--catalog {own} is no folder with .toml files; give a folder with links or devices")
    users = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gradwire" / "catalog"
    return [SHIPPED, users, *([own] if own else [])]


def read_tables(folders: Iterable[Path]) -> tuple[Tables, Tables]:
    """Read all TOML files in the folders; return (table of every link, table of every device), by name.

    An entry replaces an earlier entry with the same name.

    Raises:
        UsageError: a file is not valid TOML, or contains anything but tables [link.NAME] and [device.NAME].
    """
    links: Tables = {}
    devices: Tables = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.toml"))):
        content = read_toml(path, "catalogue file")
        refuse_unknown(content, ("link", "device"), where=str(path))
        for what, tables in (("link", links), ("device", devices)):
            found = content.get(what, {})
            if not (isinstance(found, dict) and all(isinstance(table, dict) for table in found.values())):
                raise UsageError(f"{path}: write each {what} as its own table under a heading like [{what}.name]")
            tables |= {name: (table, f"{path}, {what} {name}") for name, table in found.items()}
    return links, devices


def check_kinds(topology: Topology, links: Mapping[str, object], devices: Mapping[str, object], *measured: str) -> None:
    """Check that the catalogue has every kind of device and link that a topology names.

    Args:
        topology: the hosts, devices and links.
        links: the catalogue's links by name.
        devices: the catalogue's devices by name.
        measured: kinds of links that the catalogue may lack, because their figures are measured on this machine.

    Raises:
        UsageError: the catalogue lacks a kind.
    """
    for what, name, known in (
        *(("device", host.kind, devices) for host in topology.hosts),
        *(("link", link.kind, links) for link in (topology.links + topology.bridges) if link.kind not in measured),
        *(("device", device.kind, devices) for device in topology.devices),
    ):
        if name not in known:
            raise UsageError(
                f"the catalogue has no {what} '{name}'{did_you_mean(name, known)}; known are {', '.join(known)}, and "
                "`bench place --help` says how to add your own"
            )
