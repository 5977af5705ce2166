"""One command resolves its options once, places its ranks once, and reads a cluster's file once."""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path

from tests.testing.invoke import REPOSITORY

# This program counts calls in its process and in its forks, and in the process with torch, and then runs `bench`.
COUNTED = """
import functools, sys
from pathlib import Path
from bench.hosts import cluster_options
from bench.launch import resolve
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
    count(resolve, name)
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


def test_a_command_resolves_places_and_reads_once(tmp_path: Path) -> None:
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
    once = ("check", "place", "resolve", "cluster_from_toml", "plan_layers")
    assert collections.Counter(calls) == dict.fromkeys(once, 1)
