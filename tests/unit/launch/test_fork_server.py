"""The process that imports torch for the launcher: calls in it, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.core.errors import RunFailed, UsageError
from bench.core.run_folder import RunFolder
from bench.core.units import parse_size
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.rank import fork_server
from tests.testing import failing_ranks, prepared_ranks, returning_ranks


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(TRAIN) as server:
        server.warm_up(1)
        yield server


@pytest.mark.slow
def test_a_function_is_called_in_the_process(server: ForkServer) -> None:
    assert server.call(os.getppid) == os.getpid()


@pytest.mark.slow
def test_what_the_function_raises_is_raised_here(server: ForkServer) -> None:
    with pytest.raises(UsageError, match="nonsense"):
        server.call(parse_size, "nonsense")
    assert server.call(parse_size, "4KiB") == 4096  # the next call works


@pytest.mark.slow
def test_a_process_that_ends_instead_of_answering_is_a_failure() -> None:
    with ForkServer(TRAIN) as server:
        server.warm_up(1)
        with pytest.raises(RunFailed, match=r"^the process that the ranks are forked from was killed by SIGABRT"):
            server.call(signal.raise_signal, signal.SIGABRT)


def test_without_a_process_it_is_called_here() -> None:
    assert ForkServer(TRAIN).call(os.getpid) == os.getpid()


def test_what_a_module_prepares_is_there_for_all_ranks_and_its_failure_is_theirs_to_meet(
    server: ForkServer, tmp_path: Path
) -> None:
    told = []
    for name in ("sound", "damaged"):
        folder = RunFolder.create(tmp_path, name, "digest", 1)
        folder.rendezvous.mkdir()
        (folder.path / name).touch()
        exit_code = server.call(
            fork_server.run, prepared_ranks.__name__, folder, hosts=[((), {})], ranks_per_host=2, start_method="fork",
            grace_s=0.0,
        )  # fmt: skip
        assert exit_code == 0
        told += [json.loads((folder.path / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    parent = server.call(os.getpid)
    assert told == [[parent, parent]] * 4  # the second job prepared no data
    assert "ValueError: the data are damaged" in folder.log.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("grace_s", [60.0, 0.0])
def test_ranks_of_other_hosts_may_report_before_the_grace_is_over(
    grace_s: float, server: ForkServer, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path, "failing", "digest", 1)
    exit_code = server.call(
        fork_server.run, failing_ranks.__name__, folder, hosts=[((), {})] * 2, ranks_per_host=1, start_method="fork",
        grace_s=grace_s,
    )  # fmt: skip
    assert exit_code == 1
    assert (folder.path / "report-1").exists() == (grace_s > 0)
    causes = re.findall(r"rank +: (\d+) \(local_rank: 0\)", folder.log.read_text(encoding="utf-8"))
    assert causes == (["0", "1"] if grace_s else ["0"])


@pytest.mark.parametrize(
    ("scene", "exit_code", "starts"),
    [
        ("returns", 0, returning_ranks.STARTS),
        ("crashes", 1, fork_server.MOST_FAILED_STARTS),
        ("diverges", 1, 1),
        ("breaks", 1, 1),
        ("leaves", 1, 1),  # rank 0 does
    ],
)
def test_a_lost_rank_starts_again_unless_it_fails_by_itself_or_never_joins_or_rank_0_has_ended(
    scene: str, exit_code: int, starts: int, server: ForkServer, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path, "returning", "digest", 1)
    folder.rendezvous.mkdir()
    (folder.path / "scene").write_text(scene, encoding="utf-8")
    pause_s = server.call(_set_pause, 0.05)
    ended = server.call(
        fork_server.run, returning_ranks.__name__, folder, hosts=[((), {})], ranks_per_host=3, start_method="fork",
        grace_s=0.3,
    )  # fmt: skip
    server.call(_set_pause, pause_s)
    assert ended == exit_code
    counts = [int((folder.path / f"starts-{rank}").read_text(encoding="utf-8")) for rank in range(3)]
    assert counts == [1, starts, 1]
    log = folder.log.read_text(encoding="utf-8")
    assert ("rank 1 starts again in 0.05 s: why it failed" in log) == (scene == "returns")
    assert ("rank 1 starts again in 0.05 s: it ended with exit code -9" in log) == (scene in ("returns", "crashes"))
    assert (folder.errors / "rank-1.json").exists() == (scene == "diverges")
    assert re.findall(r"rank +: (\d+) \(local_rank", log) == {"returns": [], "leaves": ["0"]}.get(scene, ["1"])


def _set_pause(pause_s: float) -> float:
    before, fork_server.PAUSE_S = fork_server.PAUSE_S, pause_s
    return before
