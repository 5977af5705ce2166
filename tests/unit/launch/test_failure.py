"""The cause of a failed job, found from the files of its ranks."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.core.run_folder import RunFolder, write_json
from bench.launch.jobs.failure import explain

KILLED = """Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_01:58:02
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 5769)  (SIGKILL)
"""
RAISED = KILLED.replace("-9", "1")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "test", "0123456789", 1)


def leave(
    folder: RunFolder,
    rank: int,
    message: str,
    *,
    at: float,
    lost_a_peer: bool = False,
    lost_rank: int | None = None,
    traceback: str = "",
) -> None:
    report: dict[str, Any] = {"rank": rank, "time": at, "message": message, "lost_a_peer": lost_a_peer}
    write_json(folder.errors / f"rank-{rank}.json", report | {"lost_rank": lost_rank, "traceback": traceback})


def say(folder: RunFolder, log: str) -> None:
    (folder.logs / "torchrun.log").write_text(log, encoding="utf-8")


def test_the_first_rank_that_failed_by_itself_is_named(folder: RunFolder) -> None:
    leave(folder, 0, "rank 1 does not answer", at=1.0, lost_a_peer=True)
    leave(folder, 1, "ValueError: broken", at=2.0)
    say(folder, RAISED)
    assert explain(folder) == "rank 1: ValueError: broken"


IN_TORCH = """Traceback (most recent call last):
  File "/opt/bench/rank/process.py", line 1, in main
  File "/lib/python3.11/site-packages/torch/distributed/c10d.py", line 2, in init_process_group
    raise RuntimeError
RuntimeError: Unable to find address for: nope0
"""


def test_variables_and_limits_are_named_where_torch_failed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    leave(folder, 0, "RuntimeError: Unable to find address", at=1.0, traceback=IN_TORCH)
    advice = "; try without GLOO_SOCKET_IFNAME=nope0 in the environment"
    assert explain(folder) == f"rank 0: RuntimeError: Unable to find address{advice}"
    leave(folder, 0, "ValueError: broken", at=1.0, traceback=IN_TORCH.replace("/torch/", "/mine/"))
    assert explain(folder) == "rank 0: ValueError: broken"
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_NOFILE: (40, 40), resource.RLIMIT_AS: (-1, -1)}.get)
    leave(folder, 0, "socket: Too many open files", at=1.0, lost_a_peer=True)
    assert explain(folder) == f"rank 0: socket: Too many open files; `ulimit -n` is 40; raise it to 1024{advice}"
    monkeypatch.undo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    (folder.errors / "rank-0.json").unlink()
    say(folder, KILLED.replace("-9", "-11"))
    assert explain(folder) == f"rank 1 was killed by SIGSEGV{advice}"
    say(folder, KILLED)
    assert explain(folder) == "rank 1 was killed by SIGKILL; the machine may have run out of memory"


def test_a_killed_rank_is_named_before_those_that_only_lost_it(folder: RunFolder) -> None:
    leave(folder, 0, "rank 1 does not answer", at=1.0, lost_a_peer=True)
    leave(folder, 2, "RuntimeError: Connection closed by peer [127.0.0.1]:1234", at=1.1)
    say(folder, KILLED)
    assert explain(folder).startswith("rank 1 was killed by SIGKILL")


def test_a_real_error_wins_over_a_kill_that_followed_it(folder: RunFolder) -> None:
    leave(folder, 0, "the loss is nan at step 3", at=1.0)
    say(folder, KILLED)
    assert explain(folder) == "rank 0: the loss is nan at step 3"


def test_a_lost_peer_is_reported_when_nothing_else_is_known(folder: RunFolder) -> None:
    leave(folder, 2, "rank 3 does not answer", at=1.0, lost_a_peer=True)
    assert explain(folder) == "rank 2: rank 3 does not answer"


def test_who_names_the_lost_rank_is_heard_before_who_lost_all_others(folder: RunFolder) -> None:
    leave(folder, 3, "rank 3 lost all other ranks", at=1.0, lost_a_peer=True)
    leave(folder, 0, "rank 0 lost rank 3", at=2.0, lost_a_peer=True, lost_rank=3)
    leave(folder, 1, "rank 1 lost rank 3", at=3.0, lost_a_peer=True, lost_rank=3)
    assert explain(folder) == "rank 0: rank 0 lost rank 3"


def test_where_nobody_names_a_lost_rank_the_first_report_is_heard(folder: RunFolder) -> None:
    leave(folder, 0, "rank 0 and rank 1 cannot reach each other", at=2.0, lost_a_peer=True)
    leave(folder, 1, "rank 1 and rank 0 cannot reach each other", at=1.0, lost_a_peer=True)
    assert explain(folder) == "rank 1: rank 1 and rank 0 cannot reach each other"


def test_a_killed_rank_is_named_before_two_that_cannot_reach_each_other(folder: RunFolder) -> None:
    """Each host's agent reports its own root cause, including the host whose rank only lost the other."""
    leave(folder, 0, "rank 0 and rank 1 cannot reach each other", at=1.0, lost_a_peer=True)
    say(folder, RAISED.replace("rank      : 1", "rank      : 0") + KILLED)
    assert explain(folder).startswith("rank 1 was killed by SIGKILL")


def test_without_any_report_the_end_of_the_log_is_shown(folder: RunFolder) -> None:
    say(folder, "first\nImportError: no such thing\n======\n")
    assert "ImportError: no such thing" in explain(folder)


@pytest.mark.parametrize(
    ("log", "end"),
    [
        pytest.param(RAISED + "traceback : ...\n", "SyntaxError: invalid syntax", id="a-rank-failed"),
        pytest.param("Address already in use\n", "Address already in use", id="torchrun-failed"),
    ],
)
def test_a_rank_that_could_not_begin_says_why_where_torchrun_does_not(folder: RunFolder, log: str, end: str) -> None:
    say(folder, log)
    for host, (text, at) in enumerate(
        [("broken pipe", 2.0), ("in a file\nSyntaxError: invalid syntax\n", 1.0), ("", 0.5)]
    ):
        path = folder.logs / f"host-{host}" / "none_x" / "attempt_0" / "0" / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        os.utime(path, (at, at))
    assert explain(folder).endswith(f"the last line of its log: {end}")


def test_a_full_disk_is_named(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    assert "is full" in explain(folder)
