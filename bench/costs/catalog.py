"""The catalogue of links and devices: figures by name, from the files in `catalog/` and from a user's folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from bench.core.errors import UsageError
from bench.core.files import read_toml, refuse_unknown, text
from bench.core.topology import Topology
from collectives.options import did_you_mean

Figures = Literal["nominal", "measured"]
SHIPPED = Path(__file__).with_suffix("")
LARGEST = 1e9  # of any figure: no device or link is that fast or slow
SHM = "shm"
"""the link whose figures are measured on this machine"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkKind:
    """One kind of link.

    Attributes:
        bytes_per_s: in each direction.
        latency_s: of one transfer, whatever its length.
        figures: nominal (from data sheets) or measured.
        source: where the figures come from.
    """

    bytes_per_s: float
    latency_s: float
    figures: Figures
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of a device's peak that each kind of work reaches."""

    matrix: float = 0.5
    convolution: float = 0.5
    activation: float = 0.05
    other: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device.

    Attributes:
        flops_per_s: peak in fp32.
        memory_bytes_per_s: rate of its memory.
        launch_s: from asking for an operation to its start.
        efficiency: share of the peak by kind of work.
        figures, source: as a link's.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    efficiency: Efficiency
    figures: Figures
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Catalog:
    """Links and devices by name."""

    links: Mapping[str, LinkKind]
    devices: Mapping[str, DeviceKind]

    @classmethod
    def read(cls, folders: Iterable[Path]) -> Self:
        """Read every TOML file in some folders; an entry replaces those of its name in earlier files.

        Raises:
            UsageError: a file is not as it should be; the sentence names it and the entry.
        """
        links: dict[str, LinkKind] = {}
        devices: dict[str, DeviceKind] = {}
        for path in (path for folder in folders for path in sorted(folder.glob("*.toml"))):
            content = read_toml(path, "catalogue file")
            refuse_unknown(content, ("link", "device"), where=str(path))
            links |= {name: _link(table, where) for name, table, where in _entries(content, "link", path)}
            devices |= {name: _device(table, where) for name, table, where in _entries(content, "device", path)}
        return cls(links=links, devices=devices)

    def with_link(self, name: str, kind: LinkKind) -> Self:
        """Return a catalogue that has this link too; an entry of that name stays, for a user wrote it."""
        return dataclasses.replace(self, links={name: kind, **self.links})

    def check(self, topology: Topology, *measured: str) -> None:
        """Make sure that every kind of a topology has figures.

        Args:
            topology: the host, its devices and links.
            measured: kinds of links whose figures come from this machine.

        Raises:
            UsageError: one has none.
        """
        for host in topology.hosts:
            _refuse_missing(host.kind, self.devices, what="device")
        for link in topology.all_links:
            if link.kind not in measured:
                _refuse_missing(link.kind, self.links, what="link")
        for device in topology.devices:
            _refuse_missing(device.kind, self.devices, what="device")


def folders(own: Path | None) -> list[Path]:
    """Where the catalogue's files lie: the shipped ones, the user's, and the folder that was named.

    Raises:
        UsageError: the named folder holds no such file.
    """
    if own is not None and not any(own.glob("*.toml")):
        raise UsageError(f"--catalog {own} is no folder with .toml files; name one that holds links or devices")
    return [SHIPPED, users_folder(), *([own] if own else [])]


def users_folder() -> Path:
    """The folder that is read without being named; it need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gradwire" / "catalog"


def _entries(content: Mapping[str, Any], what: str, path: Path) -> list[tuple[str, Mapping[str, Any], str]]:
    found = content.get(what, {})
    if not (isinstance(found, dict) and all(isinstance(table, dict) for table in found.values())):
        raise UsageError(f"{path}: write each {what} as its own table under a heading like [{what}.name]")
    return [(name, table, f"{path}, {what} {name}") for name, table in found.items()]


def _link(table: Mapping[str, Any], where: str) -> LinkKind:
    refuse_unknown(table, ("gbytes_per_s", "latency_us", "figures", "source"), where=where)
    return LinkKind(
        bytes_per_s=1e9 * _positive(table, "gbytes_per_s", where=where),
        latency_s=1e-6 * _positive(table, "latency_us", where=where),
        figures=_figures(table, where),
        source=text(table, "source", None, where=where),
    )


def _device(table: Mapping[str, Any], where: str) -> DeviceKind:
    known = ("tflops", "gbytes_per_s", "launch_us", "efficiency", "figures", "source")
    refuse_unknown(table, known, where=where)
    shares = table.get("efficiency", {})
    if not isinstance(shares, dict):
        raise UsageError(f"{where}: efficiency={shares!r} is no table; write it like efficiency = {{ matrix = 0.7 }}")
    refuse_unknown(shares, [field.name for field in dataclasses.fields(Efficiency)], where=f"{where}, efficiency")
    return DeviceKind(
        flops_per_s=1e12 * _positive(table, "tflops", where=where),
        memory_bytes_per_s=1e9 * _positive(table, "gbytes_per_s", where=where),
        launch_s=1e-6 * _positive(table, "launch_us", where=where),
        efficiency=Efficiency(
            **{work: _positive(shares, work, where=f"{where}, efficiency", at_most=1.0) for work in shares}
        ),
        figures=_figures(table, where),
        source=text(table, "source", None, where=where),
    )


def _figures(table: Mapping[str, Any], where: str) -> Figures:
    value = text(table, "figures", "nominal", where=where)
    if value == "nominal":
        return "nominal"
    if value == "measured":
        return "measured"
    raise UsageError(f"{where}: figures={value!r} is not possible; choose nominal or measured")


def _positive(table: Mapping[str, Any], key: str, *, where: str, at_most: float = LARGEST) -> float:
    if key not in table:
        raise UsageError(f"{where} has no {key}; add a line like {key} = 1")
    value = table[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= at_most:
        raise UsageError(f"{where}: {key}={value!r} is not possible; give a number above 0, at most {at_most:g}")
    return float(value)


def _refuse_missing(name: str, known: Mapping[str, object], *, what: str) -> None:
    if name not in known:
        raise UsageError(
            f"the catalogue has no {what} '{name}'{did_you_mean(name, known)}; known are {', '.join(known)}, and "
            "`bench place --help` says how to add your own"
        )
