"""How long a job may be silent: long enough for its ranks to say why, and for ever where nothing can be heard."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.launch import torchrun
from bench.launch.patience import Patience
from bench.launch.progress import ProgressReader
from bench.launch.supervisor import STOP_GRACE_S
from collectives.liveness import GRACE_S
from tests.configs import make_config

CLUSTER: dict[str, Any] = {"hosts": [], "ranks_per_host": 1}


def test_only_the_machine_that_holds_rank_0_can_be_silent() -> None:
    second = Patience.with_job(make_config(nnodes=2, node_rank=1, timeout_s=1.0))
    assert (second.first_s, second.next_s) == (math.inf, math.inf)
    assert Patience.with_job(make_config(nnodes=2, node_rank=0, timeout_s=1.0)).next_s < math.inf


def test_ranks_come_first_with_their_verdict() -> None:
    patience = Patience.with_job(make_config(timeout_s=200.0))
    assert patience.first_s == patience.next_s > 200 + 3 * GRACE_S


def test_on_virtual_hosts_the_hung_one_is_stopped_before() -> None:
    patience = Patience.with_job(make_config(timeout_s=200.0, cluster=CLUSTER))
    assert patience.next_s > 200 + 3 * GRACE_S + torchrun.HOSTS_GRACE_S + STOP_GRACE_S
    assert torchrun.HOSTS_GRACE_S > 3 * GRACE_S


def test_processes_may_take_their_time_to_start() -> None:
    patience = Patience.with_job(make_config(timeout_s=1.0))
    assert patience.first_s == 120 > patience.next_s


def test_one_rank_waits_for_nobody() -> None:
    assert Patience.with_job(make_config(world_size=1, timeout_s=7.0)) == Patience(first_s=7.0, next_s=7.0)


@pytest.mark.parametrize("reported", ["", '{"step": 1}\n'])
def test_a_silent_job_is_stopped_and_its_silence_is_told(reported: str, tmp_path: Path) -> None:
    (tmp_path / "progress").write_text(reported, encoding="ascii")
    job = torchrun.start([sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "log")
    patience = Patience(first_s=0.4, next_s=0.2)
    ending = torchrun.watch(job, ProgressReader(tmp_path / "progress"), patience, lambda _: None)
    assert ending.silent_s == (0.2 if reported else 0.4)
    assert job.poll() is not None
