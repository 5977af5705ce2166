"""The figures of links and devices by name, from the catalogue's files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from bench.core.errors import UsageError
from bench.core.files import refuse_unknown, text
from bench.strategies.placed.catalog import read_tables

Figures = Literal["nominal", "measured"]
LARGEST = 1e9  # of any figure: no device or link is that fast or slow


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
        links, devices = read_tables(folders)
        return cls(
            links={name: _link(*found) for name, found in links.items()},
            devices={name: _device(*found) for name, found in devices.items()},
        )

    def with_link(self, name: str, kind: LinkKind) -> Self:
        """Return a catalogue that has this link too; an entry of that name stays, because a user wrote it."""
        return dataclasses.replace(self, links={name: kind, **self.links})


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
