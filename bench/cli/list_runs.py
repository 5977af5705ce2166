"""`bench list runs`, which shows the runs in a folder, how far they came, and which can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape

from bench.cli.output.console import plain_table, print_json, stdout_console
from bench.core.errors import NothingToCompare
from bench.core.locks import locked
from bench.core.run_folder import RunFolder, read_json
from bench.launch.resuming import last_step


def list_runs(out: Path, *, as_json: bool) -> None:
    """Print one row per run, oldest first; as JSON one entry per run.

    Raises:
        NothingToCompare: the folder holds no run.
    """
    folders = [RunFolder(config.parent) for config in sorted(out.glob("*/config.json"))]
    if not folders:
        raise NothingToCompare(f"there is no run in {out}; `bench run` makes one, and --out names another folder")
    runs = [_state(folder) for folder in folders]
    if as_json:
        print_json({"runs": runs})
        return
    table = plain_table()
    for heading in ("run", "status", "step", "resumes from"):
        table.add_column(heading, justify="left" if heading in ("run", "status") else "right", overflow="fold")
    for run in runs:
        shown = ("run", "status", "step", "resumable")
        table.add_row(*("" if run[name] is None else escape(str(run[name])) for name in shown))
    stdout_console().print(table)
    if any(run["resumable"] is not None for run in runs):
        stdout_console().print(f"[dim]bench run --resume {escape(str(out))}/RUN resumes one of them[/dim]")


def _state(folder: RunFolder) -> dict[str, Any]:
    """Return a run's state; its status is `running` while it runs, and `killed` if it ended without writing one."""
    with locked(folder.path) as is_left:
        summary = (read_json(folder.status) or {}) if is_left else {"status": "running"}
        return {
            "run": folder.run_id,
            "status": summary.get("status", "killed"),
            "step": summary.get("step"),
            "resumable": last_step(folder) if is_left else None,
        }
