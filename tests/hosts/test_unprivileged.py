"""An ordinary user needs no permission: the same job, started as `nobody`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.conftest import wait_for_end_of

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="every other test here already runs as an ordinary user")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that every user may write to, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def hidden_ancestor(folder: Path) -> Path | None:
    """Return the first ancestor of the folder that other users may not enter."""
    for ancestor in reversed([folder, *folder.parents]):
        if not ancestor.stat().st_mode & 0o001:
            return ancestor
    return None


def as_nobody(command: list[str], keep: Path) -> list[str]:
    """Return the command, run by `nobody`, who can also read the interpreter and this checkout below /root.

    In a private mount namespace, the hidden folder is covered by an empty one into which only the needed folders are
    mounted.
    """
    script = ["set -e"]
    needed = [Path(sys.base_prefix), Path(sys.prefix), REPOSITORY]
    hidden = {path: ancestor for path in needed if (ancestor := hidden_ancestor(path)) is not None}
    for number, path in enumerate(hidden):
        script.append(f"mkdir {keep}/{number}; mount --bind {shlex.quote(str(path))} {keep}/{number}")
    script += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(folder))}" for folder in set(hidden.values())]
    for number, path in enumerate(hidden):
        script.append(f"mkdir -p {shlex.quote(str(path))}; mount --bind {keep}/{number} {shlex.quote(str(path))}")
    script.append(f"exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups {shlex.join(command)}")
    return ["unshare", "--mount", "sh", "-c", "\n".join(script)]


def test_an_ordinary_user_gets_the_same(open_folder: Path, tmp_path: Path) -> None:
    script = f"id -u >> {open_folder}/users; ip -br link show eth0"
    command = [sys.executable, "-m", "tests.testing.hosts_launcher", "sh", "-c", script]
    done = subprocess.run(as_nobody(command, tmp_path), cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("eth0@") == 2
    assert (open_folder / "users").read_text(encoding="ascii").split() == ["0", "0"]  # root inside, and only there
    assert (open_folder / "users").stat().st_uid == NOBODY


def test_an_ordinary_users_launcher_killed_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.testing.hosts_launcher", "sleep", "600"]
    with subprocess.Popen(as_nobody(command, tmp_path), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.kill()  # `unshare`, `sh` and `setpriv` exec each other in sequence: this is the launcher itself
    wait_for_end_of(tmp_path)
