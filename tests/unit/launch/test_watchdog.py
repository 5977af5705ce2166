"""The allowed silence of a job: long enough for its ranks to report the cause; unlimited if nothing can be heard."""

from __future__ import annotations

import math
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bench.core.errors import RunFailed
from bench.launch.jobs import torchrun
from bench.launch.jobs.failure import HOSTS_GRACE_S, ProgressReader, WatchdogTimeouts
from collectives.transport.failure_detector import GRACE_S
from tests.testing.configs import make_config

CLUSTER: dict[str, Any] = {"hosts": [], "ranks_per_host": 1}


def test_other_machines_wait_for_machine_0_and_then_as_long_as_it_does() -> None:
    first, second = (
        WatchdogTimeouts.with_job(make_config(nnodes=2, node_rank=rank, timeout_s=1.0)) for rank in range(2)
    )
    assert second == first


def test_ranks_come_first_with_their_verdict() -> None:
    timeouts = WatchdogTimeouts.with_job(make_config(timeout_s=200.0))
    assert timeouts.first_s == timeouts.next_s > 200 + 3 * GRACE_S


def test_on_virtual_hosts_the_hung_one_is_stopped_before() -> None:
    timeouts = WatchdogTimeouts.with_job(make_config(timeout_s=200.0, cluster=CLUSTER))
    assert timeouts.next_s > 200 + 3 * GRACE_S + HOSTS_GRACE_S
    assert HOSTS_GRACE_S > 3 * GRACE_S


def test_processes_may_take_their_time_to_start() -> None:
    timeouts = WatchdogTimeouts.with_job(make_config(timeout_s=1.0))
    assert timeouts.first_s == 120 > timeouts.next_s


def test_one_rank_waits_for_nobody() -> None:
    alone = make_config(world_size=1, timeout_s=7.0)
    assert WatchdogTimeouts.with_job(alone) == WatchdogTimeouts(first_s=120.0, next_s=7.0)


@pytest.mark.parametrize("reported", ["", '{"step": 1}\n'])
def test_a_silent_job_is_stopped_and_its_silence_is_told(reported: str, tmp_path: Path) -> None:
    (tmp_path / "progress").write_text(reported, encoding="ascii")
    job = torchrun.start([sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "log")
    timeouts = WatchdogTimeouts(first_s=0.4, next_s=0.2)
    ending = torchrun.watch(job, ProgressReader(tmp_path / "progress"), timeouts, lambda _: None)
    assert (ending.silent_s, ending.was_heard) == ((0.2, True) if reported else (0.4, False))
    assert job.poll() is not None


def test_another_machine_is_stopped_only_after_machine_0_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "ASK_EVERY_S", 0.05)
    meeting_point = socket.create_server(("127.0.0.1", 0))
    zero = torchrun.MachineZero(f"127.0.0.1:{meeting_point.getsockname()[1]}")

    def leave_after_a_few_answers() -> None:
        for _ in range(5):
            meeting_point.accept()[0].close()
        meeting_point.close()

    leaves = threading.Thread(target=leave_after_a_few_answers)
    leaves.start()
    job = torchrun.start([sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "log")
    timeouts = WatchdogTimeouts(first_s=math.inf, next_s=0.5)
    ending = torchrun.watch(job, ProgressReader(tmp_path / "progress"), timeouts, lambda _: None, zero)
    assert ending.silent_s == 0.5
    assert ending.was_heard
    assert not leaves.is_alive()
    assert job.poll() is not None


def test_machine_0_that_has_not_come_yet_is_not_missed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    assert not torchrun.MachineZero(f"{address[0]}:{address[1]}").is_heard()


def test_a_killed_torchrun_is_named(tmp_path: Path) -> None:
    job = torchrun.start([sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "log")
    job.kill()
    timeouts = WatchdogTimeouts(first_s=60, next_s=60)
    with pytest.raises(RunFailed, match=r"^torchrun on this machine was killed by SIGKILL"):
        torchrun.watch(job, ProgressReader(tmp_path / "progress"), timeouts, lambda _: None)
