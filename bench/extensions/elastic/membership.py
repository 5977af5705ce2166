"""Membership: ranks may be lost and return while they train with local steps; rank 0 decides who takes part.

Every rank but 0 has a channel to rank 0. An exchange is one round of messages over these channels:

    other ranks -> rank 0   ready      with the exchange's number
    rank 0 -> other ranks   go         with the members: the ranks that take part
    (the members sum, over connections of their own)
    other ranks -> rank 0   summed     with the reason if the sum failed
    rank 0 -> other ranks   commit     if all members that are left succeeded; otherwise `again`: repeat the round

A rank whose channel breaks is lost. Once `quorum` ranks are ready, rank 0 waits `deadline` seconds for the others; it
tells a rank that comes later that it was left out, and this rank has to start again. A rank that starts, for the first
time or again, connects to rank 0. Rank 0 sends it the outer copy (the parameters that all ranks share) after the next
exchange, or at once if there are fewer members than the quorum. Rank 0 writes its address and a random token into a
store, so only ranks with access to the store can join.
"""

import abc
import contextlib
import dataclasses
import datetime
import hmac
import json
import socket
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.distributed_c10d import Store
from typing_extensions import override

from bench.extensions.elastic.channel import Channel, MembershipMessage
from collectives.transport.base import Ledger, MembershipError, RunEnded, TransportError

# Seconds that an attempt to connect to rank 0 may take, and seconds until the next attempt.
CONNECT_S, RETRY_S = 10.0, 0.5
# Key in the store under which rank 0 writes its address and tokens.
COORDINATOR_KEY = "gradwire/coordinator"


@dataclasses.dataclass(kw_only=True)
class Rendezvous:
    """How a rank finds and recognises the other ranks, and when an exchange goes on without absent ranks.

    Attributes:
        rank: number of this rank.
        world_size: number of ranks if none is lost.
        store: rendezvous store that all ranks can reach, also ranks that start later.
        host: this machine's address, as other machines see it.
        digest: identifies the run; a rank of another run is refused.
        timeout_s: longest wait in seconds for all ranks to start, and later for a quorum to be ready.
        quorum: smallest number of ranks for an exchange.
        deadline_s: seconds for which a quorum of ready ranks waits for the other ranks.
        interval: number of steps between two exchanges.
    """

    rank: int
    world_size: int
    store: Store
    host: str
    digest: str
    timeout_s: float
    quorum: int = 1
    deadline_s: float = 10.0
    interval: int = 1

    @property
    def sum_timeout_s(self) -> float:
        """Return the longest wait in a sum, in seconds.

        It is so short that the other ranks can repeat the sum before the launcher ends a run that shows no progress.
        """
        return self.timeout_s / 2


@dataclasses.dataclass(frozen=True)
class Participants:
    """The ranks that take part in an exchange, in ascending order.

    They make new connections to each other whenever `generation` changes.
    """

    generation: int
    ranks: Sequence[int]


class Membership(abc.ABC):
    """One rank's view of who takes part in the exchanges.

    Attributes:
        num_lost: number of times that a rank was lost or left out; counted only on rank 0.
        num_returned: number of times that a rank joined again; counted only on rank 0.
    """

    num_lost = 0
    num_returned = 0

    @abc.abstractmethod
    def join(self) -> bytes | None:
        """Join the run; return the state from which this rank starts, or None on rank 0, which begins the run.

        Raises:
            MembershipError: the ranks did not start in time, or rank 0 refuses this rank.
            TransportError: rank 0 does not answer.
        """

    @abc.abstractmethod
    def begin(self, exchange: int, steps: int) -> Participants:
        """Announce that this rank is ready for an exchange, and return the ranks that take part in the exchange.

        Args:
            exchange: number of the exchange.
            steps: number of steps that this rank has made since it joined.

        Raises:
            MembershipError: this rank came too late, or fewer ranks than the quorum are left.
            RunEnded: rank 0 has ended the run.
            TransportError: rank 0 is lost.
        """

    @abc.abstractmethod
    def agree(self, problem: str | None) -> bool:
        """Report how this rank's sum ended; return True if the sum succeeded on all members that are not lost.

        If the result is False, call `begin` again.

        Args:
            problem: why the sum failed on this rank; None if it succeeded.

        Raises:
            MembershipError: as in `begin`.
            RunEnded: as in `begin`.
            TransportError: as in `begin`.
        """

    def admit(self) -> None:  # noqa: B027 - the task of rank 0
        """Send the ranks that wait to join the state from which they start; call this after an exchange."""

    @abc.abstractmethod
    def share_figures(self, step: int, own: dict[str, Any], steps: int) -> tuple[list[dict[str, Any]], int]:
        """Send this rank's figures to rank 0; on rank 0, return the figures of all members, its own first.

        Other ranks return only their own figures. Rank 0 leaves out figures that do not come within the deadline.

        Args:
            step: number of steps of the run after which the figures were taken.
            own: this rank's figures by name; values that JSON can hold.
            steps: number of steps that this rank has made since it joined.

        Returns:
            The figures; and the number of steps that lost and late ranks had made when rank 0 last heard of them, which
            is 0 on other ranks than rank 0.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the run; on rank 0, also end the run for the other ranks."""

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Close all channels without sending a message, as if the process had ended."""


class Member(Membership):
    """The membership on any rank except rank 0: follow the decisions of rank 0.

    Args:
        rendezvous: tells how to find rank 0.
        ledger: counts the messages of this rank.
    """

    def __init__(self, rendezvous: Rendezvous, ledger: Ledger) -> None:
        self._rendezvous, self._ledger = rendezvous, ledger
        self._channel: Channel | None = None

    @override
    def join(self) -> bytes:
        rendezvous = self._rendezvous
        try:
            rendezvous.store.wait([COORDINATOR_KEY], datetime.timedelta(seconds=rendezvous.timeout_s))
            host, port, token, answer = json.loads(rendezvous.store.get(COORDINATOR_KEY))
            sock = _connected((host, port), time.monotonic() + rendezvous.timeout_s)
        except (RuntimeError, OSError) as error:
            raise TransportError(f"rank {rendezvous.rank} cannot reach rank 0: {error}", lost_rank=0) from error
        self._channel = Channel(sock, self._ledger, is_trusted=True, send_s=rendezvous.timeout_s)
        self._send("hello", rank=rendezvous.rank, token=token, digest=rendezvous.digest)
        message = self._next()
        if not hmac.compare_digest(str(message.values.get("answer")).encode(), answer.encode()):
            raise self._lost("another program answers")
        return self._obeyed(message).body

    @override
    def begin(self, exchange: int, steps: int) -> Participants:
        self._send("ready", exchange=exchange, steps=steps)
        values = self._receive().values
        return Participants(values["generation"], values["ranks"])

    @override
    def agree(self, problem: str | None) -> bool:
        self._send("summed", problem=problem)
        return self._receive().kind == "commit"

    @override
    def share_figures(self, step: int, own: dict[str, Any], steps: int) -> tuple[list[dict[str, Any]], int]:
        self._send("figures", purpose=None, step=step, figures=own, steps=steps)
        return [own], 0

    @override
    def close(self) -> None:
        self._send("bye")
        self.disconnect()

    @override
    def disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _send(self, kind: str, **values: Any) -> None:
        assert self._channel is not None
        try:
            with contextlib.suppress(ConnectionError):  # rank 0 may have sent a reason before it closed this
                self._channel.send(kind, **values)
        except OSError as error:
            self._channel.close()
            raise self._lost(error) from error

    def _receive(self) -> MembershipMessage:
        return self._obeyed(self._next())

    def _next(self) -> MembershipMessage:
        assert self._channel is not None
        try:
            return self._channel.receive()
        except (OSError, ValueError, RecursionError) as error:  # closed, or another program sent something invalid
            raise self._lost(error) from error

    def _obeyed(self, message: MembershipMessage) -> MembershipMessage:
        """Return a message from rank 0; raise an error if it says that this rank no longer takes part."""
        rank = self._rendezvous.rank
        match message.kind:
            case "end":
                raise RunEnded
            case "refused":
                raise MembershipError(
                    f"rank {rank} belongs to another run than rank 0: the machines have different options or data; use "
                    "the same command on each"
                )
            case "left_out":
                raise MembershipError(message.values["why"])
        return message

    def _lost(self, why: Exception | str) -> TransportError:
        rank = self._rendezvous.rank
        return TransportError(
            f"rank {rank} lost rank 0, which decides who takes part in exchanges ({why})", lost_rank=0
        )


def _connected(address: tuple[str, int], limit: float) -> socket.socket:
    """Connect to rank 0; retry until `limit` (a time of `time.monotonic`), because this rank's link may come back."""
    while True:
        try:
            return socket.create_connection(address, CONNECT_S)
        except ConnectionRefusedError:  # rank 0 has ended
            raise
        except OSError:
            if time.monotonic() >= limit:
                raise
        time.sleep(RETRY_S)
