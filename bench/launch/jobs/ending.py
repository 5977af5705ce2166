"""What is kept of a run that did not end well: a last row and `status.json` say how far it came, and why it ended."""

from __future__ import annotations

import shutil
from typing import Any

from bench.core import environment
from bench.core.config.run import RunConfig
from bench.core.rows import RowWriter, read_rows
from bench.core.run_folder import RunFolder, read_json, write_json
from bench.core.schema.metrics import METRICS
from bench.launch.jobs.progress import ProgressReader


def record_ending(
    config: RunConfig, folder: RunFolder, status: str, error: str, wall_time_s: float | None = None
) -> dict[str, Any]:
    """Write the last row and `status.json`, and return what the latter holds; no process of the run may be left.

    Args:
        config: the run's.
        folder: the run's.
        status: failed, timeout or interrupted.
        error: one sentence.
        wall_time_s: from the start of this job, or since the run went on, to its end, where it is known.

    Raises:
        OSError: `status.json` cannot be written.
        StoreError: the row cannot be written.
    """
    shutil.rmtree(folder.rendezvous, ignore_errors=True)
    reached = _reached(folder)
    resumes = (read_json(folder.resume) or {"resumes": 0})["resumes"]
    origin = environment.origin_columns(config.device)
    row = {
        **config.columns(),
        **origin,
        **{key: value for key, value in (read_json(folder.environment) or {}).items() if key in origin},
        **reached,
        "run_id": folder.run_id,
        "resumes": resumes,
        "status": status,
        "error": error,
    }
    summary = {"status": status, "error": error, "run_id": folder.run_id, **reached}
    try:
        row["wall_time_s"] = None if wall_time_s is None else _in_all(folder, wall_time_s, resumes)
        RowWriter(folder.metrics, METRICS).append(row)
    finally:
        write_json(folder.status, summary)
    return summary


def _in_all(folder: RunFolder, wall_time_s: float, resumes: int) -> float:
    """With what went before, of a run that went on: its last row knows that, if it is one of this time."""
    rows = list(read_rows(folder.metrics)) if folder.metrics.is_file() else []
    last = next((row for row in reversed(rows) if row.get("wall_time_s") is not None), None)
    if last is None:
        return wall_time_s
    known_s: float = last["wall_time_s"]
    return max(known_s, wall_time_s) if last.get("resumes") == resumes else known_s + wall_time_s


def _reached(folder: RunFolder) -> dict[str, Any]:
    """How far training came: by its last report, or by its last row where it was lost again before any."""
    progress = ProgressReader(folder.progress)
    progress.new_lines()
    known = progress.last
    if known.get("step") is None and folder.metrics.is_file():
        known = next((row for row in reversed(list(read_rows(folder.metrics))) if row.get("step") is not None), known)
    return {key: known.get(key) for key in ("epoch", "step")}
