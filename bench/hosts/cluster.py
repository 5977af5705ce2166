"""The description of a cluster: the virtual hosts of one run, each with its link.

A trace makes a link's rate change over time. A trace is a file of delivery opportunities: each line is the millisecond,
counted from the beginning, at which one packet of 1500 bytes may pass. Several lines with the same number let several
packets pass. An opportunity without a waiting packet is lost, small packets share an opportunity, and after the last
line the trace starts again.

Source: Netravali et al. 2015 (Mahimahi, USENIX ATC), whose recorded traces of cellular networks have this form.
"""

from __future__ import annotations

import array
import codecs
import collections
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bench.core.config.configuration import short_digest
from bench.core.counters import FRAME_BYTES, WireHeaders
from bench.core.errors import UsageError
from bench.core.files import check_regular
from bench.core.units import MAX_RATE_BPS, format_rate, format_seconds

# Addresses of one /24 network, without the first and the last.
MAX_HOSTS = 254
# Up to this rate, every packet is a single frame. At higher rates, the CPU cost of single frames would limit the rate.
REAL_FRAMES_UP_TO_BPS = 300e6
# At this rate, 100 kB take 8 s. Slower links are too slow for training, and measuring them would take minutes.
_MIN_RATE_BPS = 100e3
_MIN_CPU_SHARE = 0.05
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
# Twelve days: the forwarder stores milliseconds in 32 bits.
_LAST_MS = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A trace file, which describes a link's rate over time, and a digest to detect later changes of the file.

    Attributes:
        path: the file.
        digest: digest of the file's contents when the run was configured, ten hexadecimal digits.
        mean_bps: mean rate in bits per second, including headers: each opportunity carries a frame of 1514 bytes.
    """

    path: str
    digest: str
    mean_bps: float

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read and check a trace file, and return its path, digest and mean rate.

        Raises:
            UsageError: the file cannot be read, or its lines are not ascending whole numbers of milliseconds.
        """
        opportunities, digest = _read(path)
        mean_bps = 8 * FRAME_BYTES * len(opportunities) / (1e-3 * opportunities[-1])
        return cls(path=str(path.absolute()), digest=digest, mean_bps=mean_bps)

    def opportunities(self) -> array.array[int]:
        """Read the file; return its delivery opportunities in milliseconds, ascending, as unsigned 32-bit numbers.

        Raises:
            UsageError: the file cannot be read, or has changed since the run was configured.
        """
        opportunities, digest = _read(Path(self.path))
        if digest != self.digest:
            raise UsageError(f"the trace {self.path} has changed since the run was configured; restore the old file")
        return opportunities

    @property
    def label(self) -> str:
        """Return the file's name and digest for result rows and messages, such as ``cell.up (1a2b3c4d5e)``."""
        return f"{Path(self.path).name} ({self.digest})"


def _read(path: Path) -> tuple[array.array[int], str]:
    """Read a trace file; return its delivery opportunities in milliseconds, ascending, and a digest of them.

    Raises:
        UsageError: the file cannot be read, or its lines are not ascending whole numbers of milliseconds.
    """
    check_regular(path)
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).decode("ascii").splitlines()
    except OSError as error:
        raise UsageError(f"the trace {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(
            f"{path} is not a trace: it holds more than numbers; give a file with a whole number of milliseconds on"
            " each line"
        ) from None
    texts = [line.strip() for line in lines]
    moments = [int(text) if text.isdecimal() and len(text) < 12 else -1 for text in texts]
    for number, (before, moment) in enumerate(itertools.pairwise([0, *moments]), start=1):
        if not before <= moment <= _LAST_MS:
            raise UsageError(
                f"{path}, line {number}: '{texts[number - 1][:20]}' is not a delivery opportunity; write milliseconds"
                " as whole numbers, one on each line, none smaller than the number before"
            )
    if not any(moments):
        raise UsageError(f"{path} is not a trace: it needs a line with a millisecond above 0")
    return array.array("I", moments), hashlib.sha256(" ".join(map(str, moments)).encode()).hexdigest()[:10]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLink:
    """One virtual host and its link to the switch that joins all hosts.

    Attributes:
        name: at most 63 letters, digits, dots and dashes; shown in messages.
        uplink_bps: rate at which the host sends, in bits per second including headers; None: not limited.
        downlink_bps: rate at which the host receives, in the same unit; None: not limited.
        uplink_trace, downlink_trace: traces of rates that change over time, instead of constant rates; None: no trace.
        latency_s: one-way delay in seconds of what the host sends; a round trip between two hosts takes the sum of
            their latencies.
        jitter_s: largest deviation of the delay from `latency_s`, in seconds; the delay is uniformly random and changes
            every 10 x `jitter_s`; frames keep their order.
        loss: probability that a sent frame is lost, from 0 to below 1, independent for each frame.
        cpu_share: share of the time in which the host's processes may run, 0.05 to 1; 0.5 makes the host half as fast.

    Raises:
        UsageError: a value is out of range, `name` contains other characters, or a direction has a rate and a trace.
    """

    name: str
    uplink_bps: float | None = None
    downlink_bps: float | None = None
    uplink_trace: Trace | None = None
    downlink_trace: Trace | None = None
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    cpu_share: float = 1.0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"'{self.name}' is not a host's name; use letters, digits, dots and dashes, at most 63")
        for direction, rate, trace in (
            ("uplink", self.uplink_bps, self.uplink_trace),
            ("downlink", self.downlink_bps, self.downlink_trace),
        ):
            if rate is not None and not (_MIN_RATE_BPS <= rate <= MAX_RATE_BPS):
                raise UsageError(f"{self.name}: {direction} of {rate:g} bit/s is not possible; give 100kbit to 100gbit")
            if rate is not None and trace is not None:
                raise UsageError(f"{self.name}: the {direction} has both a rate and a trace; give one of them")
            if trace is not None and not (_MIN_RATE_BPS <= trace.mean_bps <= MAX_RATE_BPS):
                raise UsageError(
                    f"{self.name}: {direction} by {trace.label}, {format_rate(trace.mean_bps)} on average, is not"
                    " possible; give a trace with a mean rate of 100kbit to 100gbit"
                )
        for is_possible, sentence in (
            (0 <= self.latency_s <= 10, f"a latency of {self.latency_s:g} s is not possible; give 0 to 10 s"),
            (
                0 <= self.jitter_s <= self.latency_s,
                f"a jitter of {format_seconds(self.jitter_s)} needs a latency at least as large; a packet cannot"
                " arrive before it was sent",
            ),
            (0 <= self.loss < 1, f"a loss of {self.loss:g} is not possible; give a share from 0 to below 1"),
            (
                _MIN_CPU_SHARE <= self.cpu_share <= 1,
                f"a cpu_share of {self.cpu_share:g} is not possible; give 0.05 to 1",
            ),
        ):
            if not is_possible:
                raise UsageError(f"{self.name}: {sentence}")

    @property
    def impaired(self) -> bool:
        """Return True if the link delays or loses frames."""
        return self.latency_s > 0 or self.loss > 0

    @property
    def traces(self) -> tuple[Trace | None, Trace | None]:
        """Return (trace of the uplink, trace of the downlink); None for a direction without a trace."""
        return self.uplink_trace, self.downlink_trace

    @property
    def mean_rates(self) -> tuple[float | None, float | None]:
        """Return (mean uplink rate, mean downlink rate) in bits per second; None for a rate that is not limited."""
        return (
            self.uplink_trace.mean_bps if self.uplink_trace else self.uplink_bps,
            self.downlink_trace.mean_bps if self.downlink_trace else self.downlink_bps,
        )

    def figures(self) -> dict[str, Any]:
        """Return all settings except the host's name, by attribute name; "traces" holds the traces' digests, if any."""
        figures = {name: value for name, value in vars(self).items() if name != "name" and "trace" not in name}
        return figures | ({"traces": [trace and trace.digest for trace in self.traces]} if any(self.traces) else {})

    def describe(self) -> str:
        """Return one readable line, for example ``up 20 Mbit/s, down 100 Mbit/s, latency 5 ms``."""
        parts = [
            f"{word} {format_rate(rate) if rate is not None else 'not limited'}{f' by {trace.label}' if trace else ''}"
            for word, rate, trace in zip(("up", "down"), self.mean_rates, self.traces, strict=True)
        ]
        if self.latency_s:
            jitter = f" +- {format_seconds(self.jitter_s)}" if self.jitter_s else ""
            parts.append(f"latency {format_seconds(self.latency_s)}{jitter}")
        if self.loss:
            parts.append(f"loss {self.loss:.3g}")
        if self.cpu_share < 1:
            parts.append(f"runs {self.cpu_share:.0%} of the time")
        return ", ".join(parts)


def check_number_of_hosts(number: int) -> None:
    """Raise UsageError unless there are 2 to 254 hosts (the addresses of the private network)."""
    if not 2 <= number <= MAX_HOSTS:
        raise UsageError(f"{number} virtual hosts are not possible; give 2 to {MAX_HOSTS}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The virtual hosts of one run, in rank order: host 0 holds ranks 0 to `ranks_per_host` - 1, and so on.

    Attributes:
        hosts: each host with its link, 2 to 254 hosts.
        ranks_per_host: number of ranks on each host, at least 1.
        forwarded: True to use this project's forwarder for the links. False to use it only if the kernel's queues
            cannot do what the links need; this is decided when the hosts are started.

    Raises:
        UsageError: too few or too many hosts, two hosts with the same name, or fewer than one rank per host.
    """

    hosts: tuple[HostLink, ...]
    ranks_per_host: int = 1
    forwarded: bool = False

    def __post_init__(self) -> None:
        check_number_of_hosts(len(self.hosts))
        if self.ranks_per_host < 1:
            raise UsageError(f"{self.ranks_per_host} ranks per host are not possible; give at least 1")
        for name, count in collections.Counter(host.name for host in self.hosts).items():
            if count > 1:
                raise UsageError(f"two virtual hosts are named '{name}'; give each its own name")

    @classmethod
    def uniform(cls, num_hosts: int, *, ranks_per_host: int = 1, link: HostLink | None = None) -> Self:
        """Return a cluster of hosts ``host0``, ``host1``, ... that all have the given link (None: not limited)."""
        check_number_of_hosts(num_hosts)
        link = link or HostLink(name="host")
        return cls(
            hosts=tuple(dataclasses.replace(link, name=f"host{index}") for index in range(num_hosts)),
            ranks_per_host=ranks_per_host,
        )

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the whole job."""
        return len(self.hosts) * self.ranks_per_host

    @property
    def is_uniform(self) -> bool:
        """Return True if all hosts have the same link and speed."""
        return all(host.figures() == self.hosts[0].figures() for host in self.hosts)

    def columns(self) -> dict[str, Any]:
        """Return the values of a result row's columns about links, by column name.

        Each number is the worst of all hosts, such as the lowest rate and the longest latency. Rates are in bits per
        second, or None if no host is limited. `cluster_digest` tells clusters of unequal hosts apart. It is None if all
        hosts are equal, because then the other columns describe the cluster completely.
        """
        uplinks, downlinks = zip(*(host.mean_rates for host in self.hosts), strict=True)
        return {
            "uplink_bps": min((rate for rate in uplinks if rate is not None), default=None),
            "downlink_bps": min((rate for rate in downlinks if rate is not None), default=None),
            "link_trace": ", ".join(dict.fromkeys(trace.label for trace in self.traces)) or None,
            "latency_s": max(host.latency_s for host in self.hosts),
            "jitter_s": max(host.jitter_s for host in self.hosts),
            "loss_ratio": max(host.loss for host in self.hosts),
            "cpu_share": min(host.cpu_share for host in self.hosts),
            "cluster_digest": None if self.is_uniform else short_digest([host.figures() for host in self.hosts]),
        }

    @property
    def traces(self) -> list[Trace]:
        """Return all traces in use, host by host, each host's uplink before its downlink."""
        return [trace for host in self.hosts for trace in host.traces if trace is not None]

    @property
    def wire_headers(self) -> WireHeaders:
        """Return "exact" if every packet is a single Ethernet frame, so that interfaces count all headers.

        Return "estimated" if segmentation offload stays on. Offload joins frames into packets of up to 64 kB, so
        interfaces count too few headers, and the missing ones are estimated. All hosts have the same setting, because
        otherwise the bytes of some ranks would be counted and those of others estimated. A cluster that loses frames
        never uses offload, because one loss would drop up to 44 frames at once. The forwarder never uses offload.
        """
        return "exact" if self.forwarded or has_real_frames(self.hosts) else "estimated"

    def address(self, index: int) -> str:
        """Return the IPv4 address, inside the private network, of the host with this index."""
        return f"10.77.0.{index + 1}"

    def describe(self) -> list[str]:
        """Return readable lines: a single line if all hosts are equal, otherwise one line per host."""
        if self.is_uniform:
            return [f"{len(self.hosts)} hosts, each: {self.hosts[0].describe()}"]
        return [f"{host.name}: {host.describe()}" for host in self.hosts]

    def to_dict(self) -> dict[str, Any]:
        """Return the cluster as values that JSON can store."""
        return dataclasses.asdict(self) | {"hosts": [dataclasses.asdict(host) for host in self.hosts]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the cluster from the values that `to_dict` returned.

        Raises:
            UsageError: the values do not describe a cluster.
        """
        try:
            hosts = tuple(
                HostLink(**host | {key: Trace(**value) for key, value in host.items() if isinstance(value, dict)})
                for host in values["hosts"]
            )
            return cls(**{**values, "hosts": hosts})
        except (TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"these are not virtual hosts as `bench` writes them to config.json ({error})") from None


def has_real_frames(hosts: Sequence[HostLink]) -> bool:
    """Return True if the kernel carries every packet between these hosts as a single Ethernet frame, without offload.

    This holds if a host loses frames, or if all links are limited to at most 300 Mbit/s in both directions.
    """
    return any(host.loss > 0 for host in hosts) or all(
        rate is not None and rate <= REAL_FRAMES_UP_TO_BPS
        for host in hosts
        for rate in (host.uplink_bps, host.downlink_bps)
    )
