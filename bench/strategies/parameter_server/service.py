"""The server on the rank that serves, with a thread and a link for every other worker."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Mapping, Sequence
from typing import cast

import torch.distributed as dist

from collectives.parameter_server.link import serve
from collectives.parameter_server.server import ParameterServer, Session
from collectives.transport.base import Transport
from collectives.transport.process_group import ProcessGroupTransport


def star(root: int, timeout_s: float) -> dict[int, Transport]:
    """Links between `root` (rank 0 on each) and every other rank, by that rank: all on the root, else this rank's own.

    Every rank must call. A link is a process group of its own, because threads must not share one.
    """
    links: dict[int, Transport] = {}
    for worker in range(dist.get_world_size()):
        if worker != root:
            group = dist.new_group([root, worker], timeout=datetime.timedelta(seconds=timeout_s), sort_ranks=False)
            if dist.get_rank() in (root, worker):
                links[worker] = ProcessGroupTransport(cast(dist.ProcessGroup, group), timeout_s=timeout_s)
    return links


class Service:
    """The server at work: one thread for every worker elsewhere.

    Args:
        server: whose sessions they drive.
        links: one per other worker.
        numels: elements of every layer, by its id.
        own_rank: the worker of this process, which uses `own_session` directly.

    Attributes:
        server: as given.
        own_session: of this process's worker.
    """

    def __init__(
        self, server: ParameterServer, links: Mapping[int, Transport], numels: Sequence[int], *, own_rank: int
    ) -> None:
        self._numels = numels
        self.server = server
        sessions = {rank: server.join(rank) for rank in range(server.world_size)}
        self.own_session = sessions[own_rank]
        self._threads = [
            threading.Thread(
                target=self._serve, args=(link, sessions[rank]), name=f"server for rank {rank}", daemon=True
            )
            for rank, link in links.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait until every worker left."""
        for thread in self._threads:
            thread.join()

    def _serve(self, link: Transport, session: Session) -> None:
        try:
            serve(link, session, self._numels)
        except Exception as error:  # noqa: BLE001 - re-raised in every worker, this process's own included
            self.server.fail(error)
