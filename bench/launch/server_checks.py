"""What a parameter server cannot be combined with, said before any process starts."""

from __future__ import annotations

from bench.core.errors import UsageError
from bench.core.request import Request
from collectives.server import Server
from compressors.base import Compressor


def check_server(server: Server, compressor: Compressor, request: Request, *, world_size: int, device: str) -> None:
    """Refuse what the server could not do with this run.

    Args:
        server: the collective.
        compressor: what it would carry.
        request: everything else that was asked for.
        world_size: ranks of the run.
        device: where they compute, "cpu" or "cuda".

    Raises:
        UsageError: the first thing that does not fit.
    """
    if server.root >= world_size:
        raise UsageError(f"server: root={server.root} is none of the {world_size} ranks, which count from 0; lower it")
    if not server.holds_parameters:
        return
    mode, method = f"server:mode={server.mode}", compressor.component_name
    if device != "cpu":
        raise UsageError(f"{mode} works over gloo between CPUs only; add --device cpu")
    if request.trigger != "async":
        raise UsageError(f"--trigger {request.trigger} waits for all ranks, which {mode} never does; leave it out")
    if request.bucket_mb != Request.bucket_mb:
        raise UsageError(f"--bucket-mb has no meaning with {mode}, which sends every layer by itself; leave it out")
    if compressor.needs_all_ranks:
        raise UsageError(
            f"{method} has ranks agree with each other before they send, which {mode} does not let them wait for; "
            "use server:mode=bsp or another compressor"
        )
    if compressor.one_bucket:
        raise UsageError(
            f"{method} wants the whole model as one message under these options, and {mode} sends every layer by "
            "itself; use server:mode=bsp or other options"
        )
