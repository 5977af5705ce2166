"""Set-ups that several pages name, so that a name says the same on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.report.runs import Run
from benchmarks.published.figures import Which, mean_kilobytes

DENSE: Which = {"compressor": "none"}
BF16: Which = {"compressor": "bf16"}
LINKS: Mapping[str, Which] = {
    "10 Mbit/s": {"uplink_bps": 1e7},
    "100 Mbit/s": {"uplink_bps": 1e8},
    "1 Gbit/s": {"uplink_bps": 1e9},
}
WHOLE_TRAINING: Mapping[str, Callable[[Run], float | None]] = {"kB per step, whole training": mean_kilobytes}


def links(*names: str) -> Mapping[str, Which]:
    """Some of the links, in this order."""
    return {name: LINKS[name] for name in names}
