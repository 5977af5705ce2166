"""The life of a job on virtual hosts: exit codes, signals, and clean-up after any process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pydantic
import pytest

from bench.core.errors import RunFailed, UsageError
from bench.core.run_folder import RunFolder, read_json
from bench.hosts import job, support
from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.job import start_hosts
from bench.hosts.link_report import NetworkReport
from bench.hosts.support import hosts_supported
from tests.hosts.conftest import processes_of, wait_for_end_of

REPOSITORY = Path(__file__).parents[2]
PAIR = Cluster.uniform(2)


def shell(*scripts: str) -> job.CommandFor:
    return lambda index: (["sh", "-c", scripts[index]], {"HOST_INDEX": str(index)})


@contextmanager
def launcher(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher with two sleeping hosts that have the run's folder among their arguments."""
    command = ["sh", "-c", "sleep 600; true", str(run_dir)]
    arguments = [sys.executable, "-m", "tests.testing.hosts_launcher", str(run_dir), *command]
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        while (
            sum("sleep 600" in line for line in processes_of(run_dir).values()) < 3
        ):  # the launcher itself and both hosts
            time.sleep(0.02)
        try:
            yield process
        finally:
            process.kill()


def test_every_host_runs_its_command_and_the_report_is_written(tmp_path: Path) -> None:
    script = 'echo "$HOST_INDEX $BENCH_WIRE_HEADERS $(ip -br -4 addr show eth0)" > '
    with start_hosts(PAIR, tmp_path, shell(f"{script}{tmp_path}/0", f"{script}{tmp_path}/1")) as job:
        assert job.wait() == 0
    for index in range(2):
        number, headers, *interface = (tmp_path / str(index)).read_text(encoding="utf-8").split()
        assert (number, headers, interface[1:]) == (str(index), "estimated", ["UP", f"10.77.0.{index + 1}/24"])
    report = read_json(RunFolder(tmp_path).link)
    assert pydantic.TypeAdapter(NetworkReport).validate_python(report) == job.network
    assert [flow.configured_bps for flow in job.network.flows] == [None, None]
    assert job.network.warnings == ()


def test_hosts_know_each_other_by_name(tmp_path: Path) -> None:
    with start_hosts(PAIR, tmp_path, shell(f"getent hosts host1 > {tmp_path}/found", "true")) as job:
        assert job.wait() == 0
    assert "host1" in (tmp_path / "found").read_text(encoding="utf-8")


def test_the_first_failing_code_wins(tmp_path: Path) -> None:
    with start_hosts(PAIR, tmp_path, shell("sleep 0.4; exit 3", "exit 7")) as job:
        assert job.wait() == 7


def test_a_command_killed_by_a_signal_counts_as_128_and_its_number_and_is_named(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("wb") as log,
        start_hosts(PAIR, tmp_path, shell("kill -9 $$", "true"), output=log) as job,
    ):
        assert job.wait() == 137
        assert job.death() is None
    assert "torchrun on host0 was killed by SIGKILL" in (tmp_path / "log").read_text(encoding="utf-8")


def test_a_command_that_the_job_itself_kills_is_not_named(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("wb") as log,
        start_hosts(PAIR, tmp_path, shell("exit 4", "exec sleep 600"), output=log, grace_s=0.1) as job,
    ):
        assert job.wait() == 4
    assert (tmp_path / "log").read_text(encoding="utf-8") == ""


ABOVE = {
    "unshare": "unshare --user",
    "the supervisor of the virtual hosts": f"{sys.executable} -m bench.hosts.supervisor",
}


@pytest.mark.parametrize("victim", ABOVE)
def test_the_process_above_that_was_killed_is_named(tmp_path: Path, victim: str) -> None:
    with (
        (tmp_path / "log").open("wb") as log,
        start_hosts(PAIR, tmp_path, shell("exec sleep 600", "exec sleep 600"), output=log) as job,
    ):
        assert job.death() is None
        kill_above(tmp_path, victim)
        assert job.wait(timeout=10) != 0
        assert str(job.death()).startswith(f"{victim} was killed by SIGKILL")


@pytest.mark.parametrize("victim", ABOVE)
def test_the_process_that_was_killed_during_the_set_up_is_named(
    tmp_path: Path, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    tools = tmp_path / "tools"
    tools.mkdir()
    # The first `ip` of the set-up never ends, so the kill comes in the middle of the set-up on any machine.
    (tools / "ip").write_text(f"#!/bin/sh\ntouch {begun}\nexec sleep 600\n", encoding="utf-8")
    (tools / "ip").chmod(0o755)

    def kill_once_begun() -> None:
        while not begun.exists():
            time.sleep(0.005)
        kill_above(tmp_path, victim)

    killer = threading.Thread(target=kill_once_begun)
    with monkeypatch.context() as during_set_up:
        during_set_up.setenv("PATH", str(tools), prepend=os.pathsep)
        killer.start()
        with pytest.raises(RunFailed, match=f"^{victim} was killed by SIGKILL"):
            start_hosts(PAIR, tmp_path, shell("exec sleep 600", "exec sleep 600"))
    killer.join()


def kill_above(run_dir: Path, victim: str) -> None:
    os.kill(next(number for number, line in processes_of(run_dir).items() if line.startswith(ABOVE[victim])), 9)


def test_after_a_failure_the_others_are_stopped_when_the_grace_is_over(tmp_path: Path) -> None:
    with start_hosts(PAIR, tmp_path, shell("exit 4", "exec sleep 600"), grace_s=0.3) as job:
        assert job.wait(timeout=5) == 4


def test_a_stopped_command_may_say_its_last_words(tmp_path: Path) -> None:
    words = [tmp_path / f"word-{index}" for index in range(2)]
    ready = [tmp_path / f"ready-{index}" for index in range(2)]
    last_words = [
        f"trap 'echo stopped > {word}; exit 0' TERM; touch {mark}; while :; do sleep 0.05; done"
        for word, mark in zip(words, ready, strict=True)
    ]
    with start_hosts(PAIR, tmp_path, shell(*last_words)) as job:
        while not all(mark.exists() for mark in ready):
            time.sleep(0.02)
        job.terminate()
        assert job.wait(timeout=5) == 0
    assert [word.read_text(encoding="utf-8") for word in words] == ["stopped\n"] * 2


def test_a_command_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    ready = [tmp_path / f"ready-{index}" for index in range(2)]
    deaf = [f"trap '' TERM; touch {mark}; while :; do sleep 0.05; done" for mark in ready]
    with start_hosts(PAIR, tmp_path, shell(*deaf)) as job:
        while not all(mark.exists() for mark in ready):
            time.sleep(0.02)
        job.terminate()
        assert job.wait(timeout=8) == 137


def test_leaving_the_block_by_an_error_ends_the_job(tmp_path: Path) -> None:
    script = f"exec sleep 600 {tmp_path}"
    with pytest.raises(ZeroDivisionError), start_hosts(PAIR, tmp_path, shell(script, script)):
        raise ZeroDivisionError
    assert processes_of(tmp_path) == {}


def test_kill_returns_when_nothing_is_left(tmp_path: Path) -> None:
    script = f"trap '' TERM; sleep 600; true {tmp_path}"
    job = start_hosts(PAIR, tmp_path, shell(script, script))
    job.kill()
    assert job.poll() is not None
    assert processes_of(tmp_path) == {}
    job.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_launcher_is_the_end_of_the_job(tmp_path: Path, number: signal.Signals) -> None:
    with launcher(tmp_path) as process:
        process.send_signal(number)
        process.wait(timeout=10)
        wait_for_end_of(tmp_path)


def test_a_launcher_killed_during_the_set_up_leaves_nothing(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "tests.testing.hosts_launcher", str(tmp_path), "sleep", "600"]
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        while not any("bench.hosts.supervisor" in line for line in processes_of(tmp_path).values()):
            time.sleep(0.005)
        process.kill()
    wait_for_end_of(tmp_path)


@pytest.mark.parametrize("victim", ABOVE)
def test_killing_any_process_of_the_job_ends_it_without_the_launcher(tmp_path: Path, victim: str) -> None:
    with launcher(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        kill_above(tmp_path, victim)
        while any("tests.testing.hosts_launcher" not in line for line in processes_of(tmp_path).values()):
            time.sleep(0.02)
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=10) != 0


def test_a_network_that_cannot_be_built_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "tc").write_text("#!/bin/sh\necho no such kernel >&2\nexit 2\n", encoding="utf-8")
    (tools / "tc").chmod(0o755)
    assert hosts_supported()[0]  # asked once, with the real `tc`
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    link = HostLink(name="any", uplink_bps=1e7, downlink_bps=1e7)
    sentence = r"network could not be set up \(bench doctor .*\): `tc .*` said: no such kernel$"
    with pytest.raises(RunFailed, match=sentence):
        start_hosts(Cluster.uniform(2, link=link), tmp_path, shell("true", "true"))
    assert "Traceback" not in capfd.readouterr().err


def test_latency_is_refused_where_nothing_can_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "netem_supported", lambda: (False, "no network emulator"))
    monkeypatch.setattr(support, "forwarder_supported", lambda: (False, "no forwarder"))
    link = HostLink(name="any", latency_s=0.001)
    with pytest.raises(UsageError, match="no forwarder; and no network emulator; or leave them out"):
        start_hosts(Cluster.uniform(2, link=link), tmp_path, shell("true", "true"))


def test_a_machine_without_namespaces_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "hosts_supported", lambda: (False, "forbidden"))
    with pytest.raises(UsageError, match="virtual hosts do not work here: forbidden"):
        start_hosts(PAIR, tmp_path, shell("true", "true"))


def test_a_folder_that_hosts_cannot_see_is_refused() -> None:
    with pytest.raises(UsageError, match="/run is hidden"):
        start_hosts(PAIR, Path("/run"), shell("true", "true"))
