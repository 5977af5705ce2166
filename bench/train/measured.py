"""The measurements of links before the job, as columns of its rows."""

from __future__ import annotations

from typing import Any

from bench.core.run_folder import RunFolder, read_json

_COPIED = ("measured_bandwidth_bps", "measured_rtt_s", "measured_loss_ratio", "wire_headers")


def link_columns(folder: RunFolder) -> dict[str, Any]:
    """Return the measured columns, `wire_headers` and `link_warnings`; all are empty without virtual hosts."""
    measured = read_json(folder.link) or {}
    columns = {name: measured.get(name) for name in _COPIED}
    return columns | {"link_warnings": "; ".join(measured.get("warnings", ()))}
