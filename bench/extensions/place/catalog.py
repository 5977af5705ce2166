"""The catalogue: rates and other figures of each kind of link and device, from TOML files.

The files are in `catalog/` and in the user's folder. The figures of shared memory are measured on this machine.
"""

import dataclasses
import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

import numpy as np

from bench.core import processes
from bench.core.errors import RunFailed, UsageError
from bench.core.files import read_toml, refuse_unknown, text
from bench.core.processes import die_with_parent
from bench.extensions.place.topology import Topology
from collectives.options import did_you_mean, raise_first
from collectives.transport.mapped_memory import SpinThenSleep

Figures = Literal["nominal", "measured"]
LARGEST = 1e9  # largest allowed figure; no real device or link reaches it
SHIPPED = Path(__file__).with_name("catalog")
# The link whose figures are measured on this machine.
SHM = "shm"


def folders(own: Path | None = None) -> list[Path]:
    """Return the folders of catalogue files: this package's, the user's (which may not exist), and `own` if given.

    Raises:
        UsageError: `own` contains no TOML file.
    """
    if own is not None and not any(own.glob("*.toml")):
        raise UsageError(f"--catalog {own} is no folder with .toml files; give a folder with links or devices")
    users = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gradwire" / "catalog"
    return [SHIPPED, users, *([own] if own else [])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkKind:
    """One kind of link, such as a PCIe slot or an Ethernet cable.

    Attributes:
        bytes_per_s: bytes per second in each direction.
        latency_s: seconds that every transfer takes in addition, whatever its length.
        figures: "nominal" if the figures come from data sheets, or "measured".
        source: text that says where the figures come from.
    """

    bytes_per_s: float
    latency_s: float
    figures: Figures
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of a device's peak rate that each kind of operation reaches, from 0 to 1."""

    matrix: float = 0.5
    convolution: float = 0.5
    activation: float = 0.05
    other: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device, such as a model of GPU.

    Attributes:
        flops_per_s: peak rate in fp32 operations per second.
        memory_bytes_per_s: bytes per second that the device reads and writes in its own memory.
        launch_s: seconds from the request for an operation to its start.
        efficiency: share of the peak rate that each kind of operation reaches.
        figures, source: as in `LinkKind`.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    efficiency: Efficiency
    figures: Figures
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Catalog:
    """Rates and other figures of each kind of link and device, by the name of the kind."""

    links: Mapping[str, LinkKind]
    devices: Mapping[str, DeviceKind]

    @classmethod
    def read(cls, folders: Iterable[Path]) -> Self:
        """Return the entries of every TOML file in the folders; of entries with the same name, the last one counts.

        Raises:
            UsageError: a file is not valid, or contains anything but tables [link.NAME] and [device.NAME]; the message
                names the file and the entry.
        """
        links: dict[str, LinkKind] = {}
        devices: dict[str, DeviceKind] = {}
        for path in (path for folder in folders for path in sorted(folder.glob("*.toml"))):
            content = read_toml(path, "catalogue file")
            refuse_unknown(content, ("link", "device"), where=str(path))
            for what, found in content.items():
                if not (isinstance(found, dict) and all(isinstance(each, dict) for each in found.values())):
                    raise UsageError(f"{path}: write each {what} as its own table under a heading like [{what}.name]")
            of_links, of_devices = content.get("link", {}), content.get("device", {})
            links |= {name: _link(each, f"{path}, link {name}") for name, each in of_links.items()}
            devices |= {name: _device(each, f"{path}, device {name}") for name, each in of_devices.items()}
        return cls(links=links, devices=devices)

    def check(self, topology: Topology, *measured: str) -> None:
        """Check that the catalogue has every kind of device and link that a topology names.

        Args:
            topology: the hosts, devices and links.
            measured: kinds of links that the catalogue may lack, because their figures are measured on this machine.

        Raises:
            UsageError: the catalogue lacks a kind.
        """
        links = [link.kind for link in (topology.links + topology.bridges) if link.kind not in measured]
        devices = [*(host.kind for host in topology.hosts), *(device.kind for device in topology.devices)]
        raise_first(
            UsageError,
            *(
                (
                    name not in known,
                    f"the catalogue has no {what} '{name}'{did_you_mean(name, known)}; known are {', '.join(known)}, "
                    "and `bench place --help` says how to add your own",
                )
                for what, names, known in (("link", links, self.links), ("device", devices, self.devices))
                for name in names
            ),
        )


def _link(table: Mapping[str, Any], where: str) -> LinkKind:
    refuse_unknown(table, ("gbytes_per_s", "latency_us", "figures", "source"), where=where)
    return LinkKind(
        bytes_per_s=1e9 * _positive(table, "gbytes_per_s", where=where),
        latency_s=1e-6 * _positive(table, "latency_us", where=where),
        figures=_figures(table, where),
        source=text(table, "source", None, where=where),
    )


def _device(table: Mapping[str, Any], where: str) -> DeviceKind:
    refuse_unknown(table, ("tflops", "gbytes_per_s", "launch_us", "efficiency", "figures", "source"), where=where)
    shares = table.get("efficiency", {})
    if not isinstance(shares, dict):
        raise UsageError(
            f"{where}: efficiency={shares!r} is not a table; write it like efficiency = {{ matrix = 0.7 }}"
        )
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
    if value not in get_args(Figures):
        raise UsageError(f"{where}: figures={value!r} is not possible; choose nominal or measured")
    return cast(Figures, value)


def _positive(table: Mapping[str, Any], key: str, *, where: str, at_most: float = LARGEST) -> float:
    if key not in table:
        raise UsageError(f"{where} has no {key}; add a line like {key} = 1")
    value = table[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= at_most:
        raise UsageError(f"{where}: {key}={value!r} is not possible; give a number above 0, at most {at_most:g}")
    return float(value)


LONG_NBYTES = 2**24
_SHORT_NBYTES = 8
_MESSAGES = (_SHORT_NBYTES,) * 200 + (LONG_NBYTES,) * 15
_LONGEST_WAIT_S = 30.0
_LINE = 128  # distance in bytes between the counters of the two sides, so that no cache line contains both


def measured_link() -> LinkKind:
    """Measure how fast two processes on this machine pass messages through shared memory.

    One-way times of a short and of a long message are measured, each as the median of many messages; a message is
    copied into shared memory and out of shared memory.

    Raises:
        RunFailed: the other process did not answer.
        Interrupted: the user interrupted the measurement; the shared memory has been freed.
    """
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with processes.interruptible(), tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(mmap.PAGESIZE + LONG_NBYTES)
        other = multiprocessing.get_context("spawn").Process(target=_answer, args=(file.name,), daemon=True)
        other.start()
        side = _Side(file.name, own=0)
        times: dict[int, list[float]] = {_SHORT_NBYTES: [], LONG_NBYTES: []}
        try:
            for message, nbytes in enumerate(_MESSAGES, start=1):
                start = time.perf_counter()
                side.send(nbytes)
                side.receive(message, nbytes)
                times[nbytes].append((time.perf_counter() - start) / 2)
        finally:
            other.terminate()
            other.join()
    short_s, long_s = statistics.median(times[_SHORT_NBYTES]), statistics.median(times[LONG_NBYTES])
    return LinkKind(
        bytes_per_s=(LONG_NBYTES - _SHORT_NBYTES) / (long_s - short_s),
        latency_s=short_s,
        figures="measured",
        source="two processes on this machine, through memory that both map",
    )


class _Side:
    """The shared memory as one process uses it: a message counter for each process, and space for one message.

    Args:
        path: file that both processes map.
        own: index of this process's counter, 0 or 1.
    """

    def __init__(self, path: str, own: int) -> None:
        with open(path, "r+b") as file:  # noqa: PTH123 - a mapping needs the handle
            mapping = mmap.mmap(file.fileno(), 0)
        self._counters = np.frombuffer(mapping, dtype=np.uint64, count=2 * _LINE // 8)[:: _LINE // 8]
        self._message = np.frombuffer(mapping, dtype=np.uint8, offset=mmap.PAGESIZE)
        self._memory = np.ones(LONG_NBYTES, dtype=np.uint8)
        self._own = own

    def send(self, nbytes: int) -> None:
        self._message[:nbytes] = self._memory[:nbytes]
        self._counters[self._own] += 1

    def receive(self, message: int, nbytes: int) -> None:
        patience = SpinThenSleep(_LONGEST_WAIT_S)
        while self._counters[1 - self._own] < message:
            if not patience.pause():
                raise RunFailed("shared memory could not be measured: its second process did not answer; try again")
        self._memory[:nbytes] = self._message[:nbytes]


def _answer(path: str) -> None:
    """Send every message back to the first process; this function runs in the second process."""
    die_with_parent()
    side = _Side(path, own=1)
    for message, nbytes in enumerate(_MESSAGES, start=1):
        side.receive(message, nbytes)
        side.send(nbytes)
