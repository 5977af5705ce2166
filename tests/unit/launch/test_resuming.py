"""Preparing a run's folder for another attempt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typing_extensions import override

from bench.api.execution import RunSet
from bench.cli import sweep
from bench.core.config.run import RunConfig
from bench.core.errors import RunFailed, UsageError
from bench.core.run_folder import RunFolder
from bench.hosts import support
from bench.hosts.cluster import Cluster, HostLink
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.run import Result, prepare_folder
from bench.launch.sweep_file import PlannedRun
from bench.launch.sweep_state import SweepState
from bench.rank.trainer import Diverged, NeverFinite
from gradwire.step_guard import NonFiniteGradient
from tests.testing.checkpoints import add_checkpoint
from tests.testing.configs import make_config


class Here(ForkServer):
    """A fork server that calls nothing."""

    @override
    def call(self, *_: object) -> list[str]:
        return []


def test_logs_of_every_attempt_are_kept_though_the_count_of_attempts_is_lost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for text in ("first", "second", "third"):
        folder.logs.mkdir(exist_ok=True)
        (folder.logs / "rank-0.log").write_text(text, encoding="utf-8")
        prepare_folder(folder)
        folder.resume.unlink()
    kept = sorted(tmp_path.glob("logs-before-*/rank-0.log"))
    assert [path.read_text(encoding="utf-8") for path in kept] == ["first", "second", "third"]


def test_a_sweep_goes_on_with_the_timeout_that_its_file_says_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make_config(checkpoint_every=1)
    folder = RunFolder.create(tmp_path, "test", before.digest, before.seed)
    add_checkpoint(folder, before, step=1)
    now = dataclasses.replace(before, timeout_s=77.0)
    seen = []

    def resume(begun: RunFolder, _on_progress: object, _server: object, config: object) -> Result:
        seen.append(config)
        return Result(status="ok", error="", folder=begun, summary={"test_accuracy": 0.5, "wall_time_s": 1.0})

    monkeypatch.setattr(sweep, "resume", resume)
    agenda = SweepState(runs=[PlannedRun(settings={}, config=now)], out=tmp_path, past={})
    sweep.run_all(agenda, [now], Here(TRAIN))
    assert seen == [now]


def test_a_failure_that_could_not_be_kept_is_one_at_the_end_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(config: RunConfig, out: Path, *_: object) -> Result:
        return Result(status="failed", error="the disk is full", folder=RunFolder(out), summary={})

    monkeypatch.setattr(sweep, "execute", execute)
    monkeypatch.setattr(sweep, "make_each_ready", lambda *_: None)
    config = make_config()
    agenda = SweepState(runs=[PlannedRun(settings={}, config=config)], out=tmp_path, past={})
    agenda = sweep.run_all(agenda, [config], Here(TRAIN))
    with pytest.raises(RunFailed, match="1 of 1 runs failed, one of them with: the disk is full"):
        agenda.raise_failures("again")


FINAL = (Diverged, NeverFinite, NonFiniteGradient)


@pytest.mark.parametrize(
    ("kind", "is_offered"),
    [
        (None, True),
        ("TransportError", True),
        *((kind.__name__, False) for kind in (Diverged, NeverFinite, NonFiniteGradient)),
    ],
)
def test_a_run_that_would_diverge_again_is_not_to_be_resumed(
    kind: str | None, tmp_path: Path, *, is_offered: bool
) -> None:
    config = make_config(checkpoint_every=1)
    folder = RunFolder.create(tmp_path, "test", config.digest, config.seed)
    add_checkpoint(folder, config, step=1)
    result = Result(status="failed", error="broken", folder=folder, summary={"error_kind": kind})
    with pytest.raises(RunFailed, match="broken") as raised:
        RunSet(configs=[config], results=[result]).raise_failures()
    assert ("to resume from step 1: bench run --resume" in str(raised.value)) == is_offered


def test_links_that_this_machine_cannot_make_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "hosts_supported", lambda: (True, ""))
    monkeypatch.setattr(support, "netem_supported", lambda: (False, "no netem"))
    monkeypatch.setattr(support, "forwarder_supported", lambda: (False, "no TAP devices"))
    monkeypatch.setattr(sweep, "execute", lambda *_: pytest.fail("it began"))
    late = Cluster.uniform(2, link=HostLink(name="host", latency_s=0.005))
    configs = [make_config(seed=1), make_config(seed=1, cluster=late.to_dict(), world_size=2)]
    agenda = SweepState(runs=[PlannedRun(settings={}, config=each) for each in configs], out=tmp_path, past={})
    with pytest.raises(UsageError, match="latency cannot be set here: no TAP devices"):
        sweep.run_all(agenda, configs, Here(TRAIN))
