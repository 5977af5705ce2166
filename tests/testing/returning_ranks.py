"""Ranks of which some are lost and start again; rank 0 stays until the others are as they should be."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from bench.core.run_folder import RunFolder

# More starts than may be in vain: rank 1 joins each time before it is lost.
STARTS = 7


def ranks_may_leave(_: str) -> bool:
    """Let lost ranks start again."""
    return True


def main(path: str) -> int:
    """Behave as a rank of the scene that the folder's file `scene` names."""
    folder, rank = RunFolder(Path(path)), int(os.environ["RANK"])
    scene = (folder.path / "scene").read_text(encoding="utf-8")
    starts = folder.path / f"starts-{rank}"
    count = int(starts.read_text(encoding="utf-8")) + 1 if starts.exists() else 1
    starts.write_text(str(count), encoding="utf-8")
    if rank == 0:
        while scene != "leaves" and not (folder.path / "back").exists():
            time.sleep(0.01)
        return 1 if scene == "leaves" else 0
    if rank == 1 and scene == "returns":
        folder.joined(rank).touch()
        if count == 2:
            (folder.errors / "rank-1.json").write_text(
                json.dumps({"type": "TransportError", "message": "why it failed"}), encoding="utf-8"
            )
            return 1
        if count < STARTS:
            os.kill(os.getpid(), signal.SIGKILL)
        (folder.path / "back").touch()
        return 0
    if rank == 1 and scene == "crashes":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and scene in ("diverges", "breaks"):
        folder.joined(rank).touch()
        if scene == "diverges":
            report = {"type": "Diverged", "message": "the loss is nan"}
            (folder.errors / "rank-1.json").write_text(json.dumps(report), encoding="utf-8")
        return 1
    while scene == "leaves":
        time.sleep(0.01)
    return 0
