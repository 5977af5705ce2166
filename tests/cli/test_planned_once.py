"""One command builds its configuration once, plans its runs once, and reads a cluster's file once."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path

from tests.testing.invoke import REPOSITORY

# This program counts calls in its process and in its forks, and in the process with torch, and then runs `bench`.
COUNTED = """
import functools, sys
from pathlib import Path
from bench.hosts import cluster_options
from bench.launch import plan
from bench.launch.jobs import fork_server

def count(module, name):
    function = getattr(module, name)

    @functools.wraps(function)
    def counted(*args, **kwargs):
        with Path("calls").open("a") as file:
            file.write(name + chr(10))
        return function(*args, **kwargs)

    setattr(module, name, counted)

for name in ("check", "place"):
    count(plan, name)
call = fork_server.ForkServer.call

def counted_call(server, function, *args, **kwargs):
    with Path("calls").open("a") as file:
        file.write(function.__name__ + chr(10))
    return call(server, function, *args, **kwargs)

fork_server.ForkServer.call = counted_call
count(cluster_options, "cluster_from_toml")
assert "torch" not in sys.modules
sys.argv = ["bench", "run", "--dry-run", "--json", "--cluster", "two.toml", "--seeds", "1,2"]
from bench.cli.app import main
main()
"""


def test_a_command_plans_places_and_reads_once(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text("[[host]]\ncount = 2\nbandwidth = '100mbit'\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}){COUNTED}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text(encoding="utf-8").split()
    once = ("check", "place", "plan", "cluster_from_toml", "plan_layers")
    assert collections.Counter(calls) == dict.fromkeys(once, 1)


# Every Python process of the command runs this program first.
COUNTS_CONFIGURATIONS = """
import os
from pathlib import Path
from bench.core.config.run import RunConfig

check = RunConfig.__post_init__

def counted(config):
    with Path(os.environ["BUILT"]).open("a") as file:
        file.write(f"{os.getpid()}" + chr(10))
    check(config)

RunConfig.__post_init__ = counted
"""


def test_the_command_and_the_process_of_the_ranks_build_one_configuration_each(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(COUNTS_CONFIGURATIONS, encoding="utf-8")
    built = tmp_path / "built"
    arguments = ("run", "--model", "linear", "--steps", "2", "--train-size", "200", "--test-size", "20")
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=tmp_path,
        env=os.environ | {"BUILT": str(built), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    processes = built.read_text(encoding="utf-8").split()
    assert len(processes) == len(set(processes)) == 2
