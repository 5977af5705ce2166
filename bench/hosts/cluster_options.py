"""Make a `Cluster` from command-line options, named networks or a TOML file.

All three use the same words: `network`, `bandwidth` (both directions), `uplink`, `downlink`, the last three also with
`-trace` (`_trace` in a file) for a rate that changes over time, `latency`, `jitter` and `loss`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.core.config.job import RanksConfig
from bench.core.errors import UsageError
from bench.core.files import read_toml, refuse_unknown, tables, whole_number
from bench.core.units import parse_duration, parse_rate
from bench.hosts.cluster import MAX_HOSTS, Cluster, HostLink, Trace
from collectives.options import did_you_mean


def _preset(name: str, uplink: str, downlink: str, latency: str) -> HostLink:
    return HostLink(
        name=name,
        uplink_bps=parse_rate(uplink),
        downlink_bps=parse_rate(downlink),
        latency_s=parse_duration(latency),
    )


# No preset has loss: wireless links repeat lost frames themselves, so that TCP sees delay instead.
PRESETS: Mapping[str, HostLink] = {
    # ADSL2+ (ITU-T G.992.5, at most 1.4 up and 24 down), 2 km of line
    "adsl": _preset("adsl", "1mbit", "16mbit", "12ms"),
    # LTE category 4 in a busy cell; round trip 50 ms between two phones
    "4g": _preset("4g", "10mbit", "30mbit", "25ms"),
    # 802.11ac through a wall, the rate that TCP reaches
    "wifi": _preset("wifi", "100mbit", "100mbit", "2ms"),
    # gigabit Ethernet; its 50 us come from the virtual switch
    "1gbe": _preset("1gbe", "1gbit", "1gbit", "0ms"),
    # 10-gigabit Ethernet; most machines cannot reach it
    "10gbe": _preset("10gbe", "10gbit", "10gbit", "0ms"),
}

_RATES = {"bandwidth": ("uplink", "downlink"), "uplink": ("uplink",), "downlink": ("downlink",)}
_LINK_KEYS = ("network", *_RATES, *(f"{key}_trace" for key in _RATES), "latency", "jitter", "loss")
_HOST_KEYS = ("name", "count", *_LINK_KEYS, "cpu_share")
_FILE_KEYS = ("ranks_per_host", "host")


def cluster_from_options(options: RanksConfig) -> Cluster | None:
    """Return the cluster of the command line's options; None without virtual hosts.

    Raises:
        UsageError: options contradict each other or are out of range.
    """
    if options.hosts is None and options.ranks_per_host:
        raise UsageError("--ranks-per-host is for virtual hosts; say how many with --hosts N")
    texts = link_texts(options)
    if options.cluster_file is not None:
        extra = [_flag(key) for key in texts] + (["--hosts"] if options.hosts is not None else [])
        if extra:
            raise UsageError(f"--cluster and {extra[0]} both describe the hosts; put all of it into the file")
        return cluster_from_toml(Path(options.cluster_file))
    if options.hosts is None:
        if texts:
            word = _flag(next(iter(texts)))
            raise UsageError(f"{word} limits the link of virtual hosts; say how many with --hosts N")
        return None
    return Cluster.uniform(options.hosts, ranks_per_host=options.ranks_per_host or 1, link=link_of(texts))


def cluster_from_toml(path: Path) -> Cluster:
    """Read a cluster file, in which hosts may differ.

    The file contains `ranks_per_host` (default 1) and one table `[[host]]` per host, or per `count` equal hosts, with
    any of `name`, `network`, `bandwidth`, `uplink`, `downlink`, `bandwidth_trace`, `uplink_trace`, `downlink_trace`,
    `latency`, `jitter`, `loss`, `cpu_share`; the path of a trace is relative to the file's folder::

        ranks_per_host = 1

        [[host]]
        name = "rack"
        count = 3
        bandwidth = "100mbit"

        [[host]]
        name = "edge"
        uplink = "20mbit"
        downlink = "50mbit"
        latency = "5ms"
        cpu_share = 0.5

    Raises:
        UsageError: the file cannot be read, has an unknown key or a value that is out of range.
    """
    content = read_toml(path, "cluster file")
    refuse_unknown(content, _FILE_KEYS, where=str(path))
    hosts: list[HostLink] = []
    for number, table in enumerate(tables(content, "host", where=str(path)), start=1):
        where = f"{path}, host {number}: "
        hosts += _hosts_of_table(table, first_index=len(hosts), where=where, folder=path.parent)
    ranks = whole_number(content.get("ranks_per_host", 1), where=f"{path}: ranks_per_host")
    return Cluster(hosts=tuple(hosts), ranks_per_host=ranks)


def _hosts_of_table(table: Mapping[str, Any], *, first_index: int, where: str, folder: Path) -> list[HostLink]:
    refuse_unknown(table, _HOST_KEYS, where=where.removesuffix(": "))
    count = whole_number(table.get("count", 1), where=f"{where}count")
    if first_index + count > MAX_HOSTS:
        raise UsageError(f"{where}count={count} makes more than {MAX_HOSTS} virtual hosts; give fewer")
    name = table.get("name", f"host{first_index}")
    if not (isinstance(name, str) and name.strip()):
        raise UsageError(f'{where}name={name!r} is not a name; write it like name = "edge"')
    share = table.get("cpu_share", 1.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)):
        raise UsageError(f"{where}cpu_share={share!r} is not a number; write it like cpu_share = 0.5")
    texts = {key: table[key] for key in _LINK_KEYS if key in table}
    link = dataclasses.replace(link_of(texts, where=where, folder=folder), name=name, cpu_share=_as_float(share))
    if count == 1:
        return [link]
    prefix = name if "name" in table else "host"
    start = 0 if "name" in table else first_index
    return [dataclasses.replace(link, name=f"{prefix}{start + offset}") for offset in range(count)]


def link_texts(options: object) -> dict[str, str]:
    """Return a configuration's options about links that are set, by name."""
    return {key: text for key in _LINK_KEYS if (text := getattr(options, key, None)) is not None}


def link_of(texts: Mapping[str, Any], *, where: str = "--", folder: Path = Path()) -> HostLink:
    """Return the link that some options describe.

    Args:
        texts: the options' values as the user wrote them, by name.
        where: prefix of an option's name in messages.
        folder: the folder to which paths of traces are relative.

    Raises:
        UsageError: options contradict each other, or a value is not a rate, delay or share.
    """
    for key, text in texts.items():
        if key != "loss" and not isinstance(text, str):
            raise UsageError(f'{where}{key}={text!r} is not a text; write it like {key} = "{_EXAMPLE[key]}"')
    _refuse_two_rates(texts, where)
    base, network = HostLink(name="host"), texts.get("network")
    if network is not None:
        if network not in PRESETS:
            known = ", ".join(PRESETS)
            raise UsageError(f"there is no network '{network}'{did_you_mean(network, PRESETS)}; known are {known}")
        base = PRESETS[network]
    figures: dict[str, Any] = {}
    for key, directions in _RATES.items():
        for direction in directions:
            if key in texts:
                figures[f"{direction}_bps"] = parse_rate(texts[key])
            if f"{key}_trace" in texts:
                trace = Trace.of(folder / texts[f"{key}_trace"])
                figures |= {f"{direction}_bps": None, f"{direction}_trace": trace}
    for key, field, parse in (
        ("latency", "latency_s", parse_duration),
        ("jitter", "jitter_s", parse_duration),
        ("loss", "loss", _parse_share),
    ):
        if key in texts:
            figures[field] = parse(texts[key])
    return dataclasses.replace(base, **figures)


def _refuse_two_rates(texts: Mapping[str, Any], where: str) -> None:
    """Raise UsageError if a direction has two rates, two traces, or both a rate and a trace."""
    setting: dict[str, str] = {}
    for key, directions in _RATES.items():
        for word in (key, f"{key}_trace"):
            for direction in directions if word in texts else ():
                if direction in setting:
                    both = [_flag(each) if where == "--" else where + each for each in (setting[direction], word)]
                    raise UsageError(f"{both[0]} and {both[1]} both set the {direction}; give one of them")
                setting[direction] = word


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


_EXAMPLE = (
    dict.fromkeys(_RATES, "20mbit")
    | {f"{key}_trace": "cell.trace" for key in _RATES}
    | {
        "network": "wifi",
        "latency": "5ms",
        "jitter": "1ms",
    }
)


def _as_float(value: float) -> float:
    """Convert to float; a whole number larger than any float becomes infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _parse_share(value: object) -> float:
    """Parse a share such as ``1%``, ``"0.01"`` or 0.01."""
    try:
        if isinstance(value, str) and value.strip().endswith("%"):
            return float(value.strip()[:-1]) / 100
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return float(value) if isinstance(value, str) else _as_float(value)
    except ValueError:
        raise UsageError(f"'{value}' is not a share; write it like 1% or 0.01") from None
    raise UsageError(f"'{value}' is not a share; write it like 1% or 0.01")
