"""Job: what must be known of a job to start it and to see it to its end; each command's configuration says it."""

from __future__ import annotations

from typing import Any, Protocol


class Job(Protocol):
    """A job's configuration, as far as its launcher needs it."""

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""

    @property
    def nnodes(self) -> int:
        """Machines."""

    @property
    def node_rank(self) -> int:
        """This machine, from 0."""

    @property
    def ranks_per_host(self) -> int:
        """Ranks on each machine."""

    @property
    def rdzv_endpoint(self) -> str | None:
        """HOST:PORT of machine 0, where there are several."""

    @property
    def threads(self) -> int:
        """Threads per rank."""

    @property
    def timeout_s(self) -> float:
        """Longest wait of one rank for another."""

    @property
    def cluster(self) -> dict[str, Any] | None:
        """Virtual hosts as `Cluster.to_dict` gives them, None without."""
