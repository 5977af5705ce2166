"""Support of virtual hosts on the real machine: forbidden namespaces are detected and explained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ASK = "from bench.hosts.support import hosts_supported; print(*hosts_supported())"


def test_forbidden_namespaces_are_explained() -> None:
    # The limit applies in this user namespace and its children, so it affects only the inner command.
    forbid = f'echo 0 > /proc/sys/user/max_user_namespaces && exec {sys.executable} -c "{ASK}"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(
        "False private namespaces are forbidden here; allow them with `sudo sysctl user.max_user_namespaces=10000`"
    )


def test_the_machinery_needs_no_torch() -> None:
    modules = "bench.hosts.virtual_network, bench.hosts.cluster_options, bench.hosts.supervisor, bench.core.counters"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
