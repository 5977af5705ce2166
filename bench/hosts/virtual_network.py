"""VirtualNetwork, the running network of a cluster; processes of this machine run on its virtual hosts."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.errors import UsageError
from bench.core.processes import die_with_parent, enter_namespaces, import_variables
from bench.core.server_process import ServerProcess
from bench.hosts import support
from bench.hosts.cluster import Cluster
from bench.hosts.link_report import NetworkReport
from bench.hosts.network import NAMESPACES, namespace
from bench.hosts.support import UNSHARE, search_path

SUPERVISOR = "bench.hosts.supervisor"


class VirtualNetwork(ServerProcess):
    """The running network of a cluster, with links that have been measured.

    The network belongs to a child process, the supervisor, which keeps it in private namespaces. The network needs no
    privileges, changes nothing outside of these namespaces, and disappears when the supervisor and the processes on the
    hosts have ended.

    Args:
        cluster: the hosts and their links.

    Attributes:
        cluster: the hosts and their links, as given.
        report: the measurements of the links.
        variables: environment variables for every process on a host.

    Raises:
        UsageError: virtual hosts, or the settings of their links, are not possible here.
        RunFailed: the network could not be built, or a host cannot reach another.
    """

    report: NetworkReport
    variables: dict[str, str]

    def __init__(self, cluster: Cluster) -> None:
        for what, needed in ("the Python interpreter", Path(sys.executable)), ("bench", Path(__file__)):
            if any(each.is_relative_to("/run") for each in (needed.absolute(), needed.resolve())):
                raise UsageError(f"{what} is {needed}, and virtual hosts have their own /run; install it elsewhere")
        self.cluster = cluster
        chosen = support.check_and_choose_backend(cluster)
        command = [*UNSHARE, sys.executable, "-m", SUPERVISOR]
        super().__init__("the supervisor of the virtual hosts", command, import_variables() | {"PATH": search_path()})
        try:
            self.report, self.variables = self.call(chosen)
        except BaseException:
            self.close()
            raise

    def restart(self, seed: int) -> None:
        """Start the links' varying rates, losses and jitter from their beginning, for the next job.

        Args:
            seed: seed of the losses and jitter that the forwarder makes.

        Raises:
            RunFailed: the supervisor has ended.
        """
        self.call(seed)

    def namespaces(self, index: int) -> tuple[Path, Path]:
        """Return the files of the user and network namespace of the host with this index, in the order to enter them.

        `processes.enter_namespaces` enters them.
        """
        return Path(f"/proc/{self.pid}/ns/user"), Path(f"/proc/{self.pid}/root{NAMESPACES}", namespace(index))

    def start(
        self, index: int, command: Sequence[str], variables: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host; the command is killed when this process ends.

        Args:
            index: the host's index.
            command: the command line.
            variables: environment variables to add to those of this process and of the network.
            options: further arguments of `subprocess.Popen`.
        """

        def enter() -> None:
            enter_namespaces(*self.namespaces(index))
            die_with_parent()

        environment = os.environ | {"PATH": search_path()} | self.variables | dict(variables or {})
        return subprocess.Popen(command, env=environment, preexec_fn=enter, **options)


def forwarded_bps() -> float:
    """Measure how much the forwarder can carry between two hosts without rate limits; takes two seconds.

    Return the sum of both directions in bits per second, including headers.

    Raises:
        UsageError: virtual hosts or the forwarder do not work here.
        RunFailed: the virtual hosts could not be set up.
    """
    with VirtualNetwork(dataclasses.replace(Cluster.uniform(2), forwarded=True)) as network:
        return sum(flow.long_bps for flow in network.report.flows)
