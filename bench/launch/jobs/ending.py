"""Record a run that failed or was stopped: a last row and `status.json` say how far it came and why it ended."""

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
    """Write the last row and `status.json`; return the content of the latter. No process of the run may be left.

    Args:
        config: the run's configuration.
        folder: the run's folder.
        status: failed, timeout or interrupted.
        error: one sentence.
        wall_time_s: duration of this job, without those before it was resumed; None: unknown.

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
    """Return the duration of all jobs of the run; its last row holds that of earlier jobs, or includes this one."""
    rows = list(read_rows(folder.metrics)) if folder.metrics.is_file() else []
    last = next((row for row in reversed(rows) if row.get("wall_time_s") is not None), None)
    if last is None:
        return wall_time_s
    known_s: float = last["wall_time_s"]
    return max(known_s, wall_time_s) if last.get("resumes") == resumes else known_s + wall_time_s


def _reached(folder: RunFolder) -> dict[str, Any]:
    """Return how far training came, from the job's last report, or from the last row if there is no report."""
    progress = ProgressReader(folder.progress)
    progress.new_lines()
    known = progress.last
    if known.get("step") is None and folder.metrics.is_file():
        known = next((row for row in reversed(list(read_rows(folder.metrics))) if row.get("step") is not None), known)
    return {key: known.get(key) for key in ("epoch", "step")}
