"""Settings for all tests: one thread per process, plain wide output, and nothing left running."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Set before anything imports torch or typer, which read these variables once.
os.environ |= {
    "OMP_NUM_THREADS": "1",  # ranks share few cores
    "COLUMNS": "200",  # help and tables are not wrapped
    "NO_COLOR": "1",
    "_TYPER_FORCE_DISABLE_TERMINAL": "1",  # some CI services make typer believe that there is a terminal
}
os.environ.pop("FORCE_COLOR", None)
# Tests start some hundred Python programs, each of which would otherwise compile all its modules again.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU, slowly
# A shell that runs the tests in the background ignores Ctrl-C for them, and nohup ignores the end of the terminal; the
# programs that they start would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import hypothesis
import psutil
import pytest

from collectives.kernels import library
from tests.testing.on_ranks import folder, pytest_pyfunc_call, rank, start_of  # noqa: F401 - fixtures and a hook

if TYPE_CHECKING:
    from bench.launch.jobs.fork_server import ForkServer

# Folders whose tests are short.
SHORT = ("contract", "extensions", "unit")

# A busy machine must not turn a slow example into a failure.
hypothesis.settings.register_profile("bench", deadline=None)
hypothesis.settings.load_profile("bench")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=200, help="random inputs per native loop")
    parser.addoption("--loops", type=Path, help="folder of the native loops to test, instead of those in use")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(number, apart): the test is called on every rank, with its `rank`")
    if loops := config.getoption("--loops"):
        other = library.load(loops)
        assert other.handle is not None, other.finding
        library.found = lambda: other


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hand out tests to parallel processes: those on ranks by their start, and short ones by the module.

    One by one, thousands would be waited for.
    """
    for item in items:
        module = item.path.relative_to(Path(__file__).parent)
        if item.get_closest_marker("xdist_group") is not None:
            continue
        if of := start_of(item):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} on ranks {of}"))
        elif module.parts[0] in SHORT:
            item.add_marker(pytest.mark.xdist_group(str(module)))


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> range:
    """Seeds of the random inputs on which native loops are compared with the reference path."""
    return range(request.config.getoption("--cases"))


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Yield an empty folder in memory that the test must leave empty; other programs use /dev/shm meanwhile."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as empty:
        yield Path(empty)
        assert not list(Path(empty).iterdir())


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep copies of the test's texts out of the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session", autouse=True)
def _notes_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a separate folder for notes on running jobs: the user's next command must not report the tests' launchers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """Fail the last test of a module if child processes or threads remain after it."""
    processes_before, threads_before = set(_children()), set(threading.enumerate())
    yield
    processes = {child: name for child, name in _children().items() if child not in processes_before}
    threads = [thread.name for thread in threading.enumerate() if thread not in threads_before and not thread.daemon]
    assert not processes, f"processes left running: {sorted(processes.values())}"
    assert not threads, f"threads left running: {threads}"


def _children() -> dict[int, str]:
    """Return the command line of every descendant process, except those that multiprocessing keeps for itself."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "multiprocessing.resource_tracker" not in line and "multiprocessing.forkserver" not in line:
            found[child.pid] = line or "(a process that ended and was not waited for)"
    return found


@pytest.fixture(scope="session")
def _fork_server() -> Iterator[ForkServer]:
    from bench.launch.jobs.fork_server import TRAIN, ForkServer

    with ForkServer(TRAIN) as server:
        server.warm_up(threads=1)
        yield server


@pytest.fixture
def forked_here(_fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks of commands that this process runs from one process for all tests; each has one thread.

    Otherwise every command would start a process that imports torch, which takes longer than most jobs of tests. A
    module whose tests use this must use it in all of them, so that none is taken for what left the process running.
    """
    for command in ("run", "sweep"):
        monkeypatch.setattr(f"bench.cli.{command}.ForkServer", lambda _: contextlib.nullcontext(_fork_server))


@pytest.fixture
def planned_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan in this process, which has already imported torch, instead of in a new process."""
    from bench.launch.jobs.fork_server import ForkServer

    monkeypatch.setattr(ForkServer, "warm_up", lambda _server, _threads: None)
