"""Make a `Cluster` from command-line options, named networks or a TOML file.

Options and files use the same names: `network`, `bandwidth` (both directions), `uplink`, `downlink`, `latency`,
`jitter` and `loss`. For rates that change over time there are also `bandwidth-trace`, `uplink-trace` and
`downlink-trace` (in a file, with `_` instead of `-`).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.core.config.run import RanksConfig
from bench.core.errors import UsageError
from bench.core.files import read_toml, refuse_unknown, tables, whole_number
from bench.core.units import parse_duration, parse_rate
from bench.hosts.cluster import MAX_HOSTS, Cluster, HostLink, Trace
from collectives.options import did_you_mean

# No preset has loss: wireless links repeat lost frames themselves, so that TCP sees delay instead.
PRESETS: Mapping[str, HostLink] = {
    # ADSL2+ (ITU-T G.992.5, at most 1.4 up and 24 down), 2 km of line
    "adsl": HostLink(name="adsl", uplink_bps=1e6, downlink_bps=16e6, latency_s=12e-3),
    # LTE category 4 in a busy cell; round trip 50 ms between two phones
    "4g": HostLink(name="4g", uplink_bps=10e6, downlink_bps=30e6, latency_s=25e-3),
    # 802.11ac through a wall, the rate that TCP reaches
    "wifi": HostLink(name="wifi", uplink_bps=100e6, downlink_bps=100e6, latency_s=2e-3),
    # gigabit Ethernet; its delay of 50 us comes from the virtual switch
    "1gbe": HostLink(name="1gbe", uplink_bps=1e9, downlink_bps=1e9),
    # 10-gigabit Ethernet; most machines cannot reach this rate
    "10gbe": HostLink(name="10gbe", uplink_bps=10e9, downlink_bps=10e9),
}

_RATES = {"bandwidth": ("uplink", "downlink"), "uplink": ("uplink",), "downlink": ("downlink",)}
_TRACES = {f"{key}_trace": directions for key, directions in _RATES.items()}
# Options that are texts, each with an example of its value.
_EXAMPLE = (
    {"network": "wifi"}
    | dict.fromkeys(_RATES, "20mbit")
    | dict.fromkeys(_TRACES, "cell.trace")
    | {"latency": "5ms", "jitter": "1ms"}
)
_LINK_KEYS = (*_EXAMPLE, "loss")
_HOST_KEYS = ("name", "count", *_LINK_KEYS, "cpu_share")
_FILE_KEYS = ("ranks_per_host", "host")


def cluster_from_options(options: RanksConfig) -> Cluster | None:
    """Return the cluster that command-line options describe; None if they ask for no virtual hosts.

    Raises:
        UsageError: options contradict each other or are out of range.
    """
    if options.hosts is None and options.ranks_per_host:
        raise UsageError("--ranks-per-host is for virtual hosts; give their number with --hosts N")
    texts = link_texts(options)
    if options.cluster_file is not None:
        extra = [_flag(key) for key in texts] + (["--hosts"] if options.hosts is not None else [])
        if extra:
            raise UsageError(f"--cluster and {extra[0]} both describe the hosts; put all settings into the file")
        return cluster_from_toml(Path(options.cluster_file))
    if options.hosts is None:
        if texts:
            raise UsageError(
                f"{_flag(next(iter(texts)))} limits the link of virtual hosts; give their number with --hosts N"
            )
        return None
    return Cluster.uniform(options.hosts, ranks_per_host=options.ranks_per_host or 1, link=link_of(texts))


def cluster_from_toml(path: Path) -> Cluster:
    """Read a cluster file, in which hosts may differ.

    The file contains `ranks_per_host` (default 1) and one table `[[host]]` per host, or per group of `count` equal
    hosts. A table may have the keys `name`, `network`, `bandwidth`, `uplink`, `downlink`, `bandwidth_trace`,
    `uplink_trace`, `downlink_trace`, `latency`, `jitter`, `loss` and `cpu_share`. The path of a trace is relative to
    the file's folder::

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
        UsageError: the file cannot be read, or has an unknown key or a value out of range.
    """
    content = read_toml(path, "cluster file")
    refuse_unknown(content, _FILE_KEYS, where=str(path))
    hosts: list[HostLink] = []
    for number, table in enumerate(tables(content, "host", where=str(path)), start=1):
        hosts += _hosts_of_table(table, first_index=len(hosts), where=f"{path}, host {number}: ", folder=path.parent)
    return Cluster(
        hosts=tuple(hosts),
        ranks_per_host=whole_number(content.get("ranks_per_host", 1), where=f"{path}: ranks_per_host"),
    )


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
    # Convert through a text, because a whole number that is too large for a float then becomes infinity.
    link = dataclasses.replace(link_of(texts, where=where, folder=folder), name=name, cpu_share=float(str(share)))
    if count == 1:
        return [link]
    prefix, start = (name, 0) if "name" in table else ("host", first_index)
    return [dataclasses.replace(link, name=f"{prefix}{start + offset}") for offset in range(count)]


def link_texts(options: object) -> dict[str, str]:
    """Return a configuration's options about links by name, as the user wrote them; options not set are left out."""
    return {key: text for key in _LINK_KEYS if (text := getattr(options, key, None)) is not None}


def link_of(texts: Mapping[str, Any], *, where: str = "--", folder: Path = Path()) -> HostLink:
    """Return the link that these options describe.

    Args:
        texts: the options' values as the user wrote them, by option name.
        where: prefix of an option's name in error messages.
        folder: the folder to which paths of traces are relative.

    Raises:
        UsageError: options contradict each other, or a value is not a rate, a delay or a probability.
    """
    for key, text in texts.items():
        if key in _EXAMPLE and not isinstance(text, str):
            raise UsageError(f'{where}{key}={text!r} is not text in quotes; write it like {key} = "{_EXAMPLE[key]}"')
    set_by: dict[str, str] = {}  # direction -> the option that sets its rate or trace
    for key in sorted(texts):
        for direction in (_RATES | _TRACES).get(key, ()):
            if direction in set_by:
                both = [_flag(each) if where == "--" else where + each for each in (set_by[direction], key)]
                raise UsageError(f"{both[0]} and {both[1]} both set the {direction}; give one of them")
            set_by[direction] = key
    base, network = HostLink(name="host"), texts.get("network")
    if network is not None:
        if network not in PRESETS:
            raise UsageError(
                f"there is no network '{network}'{did_you_mean(network, PRESETS)}; known are {', '.join(PRESETS)}"
            )
        base = PRESETS[network]
    figures: dict[str, Any] = {}
    for direction, key in set_by.items():
        if key in _TRACES:
            figures |= {f"{direction}_bps": None, f"{direction}_trace": Trace.of(folder / texts[key])}
        else:
            figures[f"{direction}_bps"] = parse_rate(texts[key])
    for key, field, parse in (
        ("latency", "latency_s", parse_duration),
        ("jitter", "jitter_s", parse_duration),
        ("loss", "loss", _parse_share),
    ):
        if key in texts:
            figures[field] = parse(texts[key])
    return dataclasses.replace(base, **figures)


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _parse_share(value: object) -> float:
    """Parse a probability such as ``1%``, ``"0.01"`` or 0.01, and return it as a number (0.01)."""
    text = str(value).strip()
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"'{value}' is not a probability of loss; write it like 1% or 0.01") from None
