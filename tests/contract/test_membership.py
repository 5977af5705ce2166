"""The messages by which rank 0 decides who takes part: ranks that are late, that do not read, or that are strangers."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from collectives.transport.base import Ledger, TransportError
from compressors.local.channel import Channel
from compressors.local.membership import Meeting, Member


def member(sock: socket.socket) -> Member:
    """Return rank 1, which has joined over a connected socket."""
    meeting = Meeting(rank=1, world_size=2, store=HashStore(), host="127.0.0.1", digest="run", timeout_s=0.05)
    made = Member(meeting, Ledger())
    made._channel = Channel(sock, Ledger(), is_trusted=True, send_s=meeting.timeout_s)
    return made


def connected() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def test_a_rank_whose_messages_nobody_takes_ends_and_sends_no_part_of_one() -> None:
    one, other = connected()
    with one, other:
        rank = member(one)
        with pytest.raises(TransportError, match="rank 1 lost rank 0"):
            rank.share_figures(1, {"index_sets": "x" * 100_000_000}, 1)
        assert one.fileno() == -1


def test_the_kernel_gives_up_on_bytes_that_are_not_acknowledged() -> None:
    one, other = connected()
    with one, other:
        Channel(one, Ledger(), is_trusted=True, send_s=90.0)
        Channel(other, Ledger(), is_trusted=True, send_s=1.0)
        if name := getattr(socket, "TCP_USER_TIMEOUT", None):
            assert [sock.getsockopt(socket.IPPROTO_TCP, name) for sock in (one, other)] == [90_000, 60_000]
