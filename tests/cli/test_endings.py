"""Endings of commands: every error from outside ends in one sentence and an exit code of the README."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.fake_rows import fake_seeds, topk_seeds
from tests.testing.invoke import REPOSITORY, Answer, execute, invoke, without_waiting

LONG = "x" * 300
BENCH = f"{shlex.quote(sys.executable)} -P -m bench"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a CSV file, a pipe and a link to itself."""
    write(tmp_path / "good.csv", [1000, 1100, 1200], [2000, 2100, 2200])
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def write(path: Path, dense: list[float], sparse: list[float]) -> None:
    from bench.core.rows import RowWriter

    RowWriter(path).extend(fake_seeds(dense) + topk_seeds(sparse))


def shell(line: str, folder: Path, **variables: str) -> Answer:
    """Run a line that contains `bench` in a shell, which does the redirections."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("bench", BENCH, 1)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"} | variables,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return Answer(done.returncode, done.stdout, without_waiting(done.stderr))


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        ("compare good.csv --by zzz", 2, "there is no column 'zzz'"),
        ("compare good.csv --by ''", 2, "there is no column ''"),
        ("compare pipe", 2, "pipe is not a regular file"),
        ("compare /dev/zero", 2, "/dev/zero is not a regular file"),
        ("compare loop", 4, "Too many levels of symbolic links"),
        (f"compare {LONG}", 2, "File name too long"),
        ("compare good.csv --out pipe", 2, "pipe is a pipe"),
        (f"compare good.csv --out {LONG}", 2, "File name too long"),
        ("run --dry-run --cluster pipe", 2, "pipe is not a regular file"),
        ("run --dry-run --cluster loop", 2, "Too many levels of symbolic links"),
        (f"run --dry-run --cluster {LONG}", 2, "File name too long"),
        (f"run --steps 1 --out {LONG}", 2, "File name too long"),
        ("run --steps 1 --out loop", 2, "--out"),
        (f"data --data-dir {LONG}", 2, "File name too long"),
        (f"doctor --no-smoke --out {LONG}", 2, "File name too long"),
        ("data prepare cifar10:url=http://[::1/x", 2, "Invalid IPv6 URL"),
    ],
)
def test_a_path_that_cannot_be_used(
    line: str, code: int, sentence: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    answer = invoke(*shlex.split(line))
    assert answer.code == code
    assert sentence in answer.error
    assert "\n" not in answer.error


def test_infinities_and_giants_in_a_csv_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    inf = float("inf")
    write(folder / "inf.csv", [inf, inf, 3], [2000, inf, inf])
    assert invoke("compare", "inf.csv").code == 0
    write(folder / "giants.csv", [1e300, 3], [2000])
    answer = invoke("compare", "giants.csv")
    assert answer.code == 0
    assert "giants.csv line 2 is skipped" in answer.error


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000 + "]" * 5000, "[[host]]\ncount = " + "9" * 5000, "[[host]]\nname = '\ud800'"]
)
def test_a_cluster_file_that_python_cannot_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_bytes(text.encode("utf-8", errors="surrogatepass"))
    answer = invoke("run", "--dry-run", "--cluster", str(tmp_path / "cluster.toml"))
    assert answer.code == 2
    assert "is not TOML" in answer.error


@pytest.mark.parametrize("command", ["list", "list --json", "compare good.csv", "--help", "--version"])
def test_an_output_that_takes_nothing(command: str, folder: Path) -> None:
    answer = shell(f"bench {command} >/dev/full", folder)
    assert answer.code == 3
    assert answer.error == "bench: the output cannot be written: No space left on device; make room and try again\n"


def test_errors_that_cannot_be_told_keep_their_exit_code(folder: Path) -> None:
    assert shell("bench compare nowhere 2>/dev/full", folder).code == 4


@pytest.mark.parametrize("command", ["list --json", "compare good.csv", "run --help"])
def test_a_reader_that_goes_away(command: str, folder: Path) -> None:
    answer = shell(f"bench {command} | true", folder)
    assert answer.code == 3
    assert answer.error == "bench: the program that reads the output ended before all of it was written\n"


@pytest.mark.parametrize(
    "encoding", ["ascii", *(pytest.param(other, marks=pytest.mark.long) for other in ("latin-1", "cp1252"))]
)
@pytest.mark.parametrize("command", ["--help", "compare good.csv", "compare good.csv --format markdown"])
def test_an_encoding_that_lacks_a_sign(command: str, encoding: str, folder: Path) -> None:
    answer = shell(f"bench {command}", folder, PYTHONIOENCODING=encoding)
    assert answer.code == 0, answer.error
    assert answer.out


@pytest.mark.parametrize("command", ["list", "compare", "run --dry-run", "doctor --no-smoke"])
def test_a_working_directory_that_is_gone(command: str, folder: Path) -> None:
    answer = shell(f"mkdir gone && cd gone && rmdir ../gone && bench {command}", folder)
    assert answer.code == 2
    assert answer.error == "bench: the working directory no longer exists; change to another one\n"


def test_a_disk_that_is_full_before_the_run_starts(folder: Path) -> None:
    """The file system has one page, and is mounted in a private namespace."""
    full = "mkdir full && mount -t tmpfs -o size=4k,nr_inodes=20 none full && head -c 4096 /dev/zero >full/x"
    line = f"{full}; cd {folder}; bench run --model linear --steps 1 --out full/runs; code=$?; ls -R full; exit $code"
    unshared = shell(f"unshare --map-root-user --mount bash -c {shlex.quote(line)}", folder)
    if "unshare failed" in unshared.error or "mount:" in unshared.error:
        pytest.skip(unshared.error)
    assert unshared.code == 3
    assert unshared.error.splitlines()[1:] == [
        "bench: the output cannot be written: No space left on device; make room and try again"
    ]
    assert unshared.out.split() == ["full:", "runs", "x", "full/runs:"]  # no file of the run


SHORT = "--dataset digits --model linear --steps 2 --train-size 64 --test-size 32 --batch-size 8 --out runs"
ALL_CLOSED = ">&- 2>&- <&-"
ONE_CLOSED = (">&-", "2>&-", "<&-")
# The second: what is closed in the tests that are not long; jobs take seconds.
STREAM_COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("list", ()),
    ("compare good.csv", (*ONE_CLOSED, ALL_CLOSED)),
    (f"run {SHORT}", (ALL_CLOSED,)),
    ("sweep one.toml --out runs", ()),
)


@pytest.mark.parametrize(
    ("command", "closed"),
    [
        pytest.param(command, closed, marks=[] if closed in usual else [pytest.mark.long])
        for command, usual in STREAM_COMMANDS
        for closed in (*ONE_CLOSED, ALL_CLOSED)
    ],
)
def test_closed_standard_streams(command: str, closed: str, folder: Path) -> None:
    (folder / "one.toml").write_text(
        "[base]\nmodel = 'linear'\nsteps = 2\ntrain_size = 64\ntest_size = 32\nbatch_size = 8\n", encoding="utf-8"
    )
    answer = shell(f"bench {command} {closed}", folder)
    assert answer.code == 0, answer.error
    assert "Traceback" not in answer.error


@pytest.mark.parametrize(
    "backend",
    [
        "module://matplotlib_inline.backend_inline",
        *(pytest.param(b, marks=pytest.mark.long) for b in ("nonsense", "TkAgg")),
    ],
)
@pytest.mark.parametrize("command", ["plot target good.csv --out drawn.pdf", "report good.csv --out page.html"])
def test_pictures_are_drawn_whatever_backend_is_asked_for(command: str, backend: str, folder: Path) -> None:
    answer = shell(f"bench {command}", folder, MPLBACKEND=backend, SOURCE_DATE_EPOCH="abc")
    assert answer.code == 0, answer.error


@pytest.mark.parametrize("command", [f"run {SHORT}", "run --dry-run"])
def test_a_variable_with_which_torch_cannot_be_imported_is_named(command: str, folder: Path) -> None:
    answer = shell(f"bench {command}", folder, TORCH_DISTRIBUTED_DEBUG="nonsense")
    assert answer.code == 2
    assert answer.error == (
        "bench: torch cannot be imported: The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL; try "
        "without TORCH_DISTRIBUTED_DEBUG=nonsense in the environment\n"
    )


def test_a_variable_with_which_ranks_cannot_meet_is_named(folder: Path) -> None:
    answer = shell(f"bench run {SHORT}", folder, GLOO_SOCKET_IFNAME="nope0")
    assert answer.code == 3
    assert "try without GLOO_SOCKET_IFNAME=nope0 in the environment" in answer.error


@pytest.mark.parametrize("mount", ["mount -t tmpfs -o ro none /dev/shm"])
def test_shared_memory_that_cannot_be_written_is_named(mount: str, folder: Path) -> None:
    """The command runs in a private namespace in which /dev/shm is read-only."""
    line = f"{mount} && cd {folder} && exec 0<&- && bench run {SHORT}"
    answer = shell(f"unshare --map-root-user --mount bash -c {shlex.quote(line)}", folder)
    if "unshare failed" in answer.error or "mount:" in answer.error:
        pytest.skip(answer.error)
    assert answer.code == 2
    assert "processes cannot share locks, which need a writable /dev/shm" in answer.error


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import bench.report.store as s\ndef read(*a, **k): raise FileNotFoundError(2, 'No such file', 'internal')\n"
        "s.read = read\n",
        encoding="utf-8",
    )
    answer = execute("compare", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert answer.code == 1
    assert "FileNotFoundError" in answer.error
