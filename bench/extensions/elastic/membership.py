"""Membership: ranks may be lost and return while they train with local steps; rank 0 decides who takes part.

Every rank but 0 has a channel to rank 0. An exchange is one round of messages over these channels:

    other ranks -> rank 0   ready      with the exchange's number
    rank 0 -> other ranks   go         with the members: the ranks that take part
    (the members sum, over connections of their own)
    other ranks -> rank 0   summed     and whether the sum succeeded
    rank 0 -> other ranks   commit     if all members that are left succeeded; otherwise `again`: repeat the round

A rank whose channel breaks is lost. Once `quorum` ranks are ready, the others have `deadline` seconds; a rank that is
later is told so and has to start again. A rank that starts, at first or again, connects to rank 0, which sends it the
outer copy after the next exchange; with fewer members than the quorum, at once. Rank 0 writes its address and a random
token into a store, so only ranks with access to the store can join.
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

# Seconds for one try to connect to rank 0, and until the next one.
CONNECT_S, RETRY_S = 10.0, 0.5
# Key of rank 0's address and tokens in the store.
COORDINATOR_KEY = "gradwire/coordinator"


@dataclasses.dataclass(kw_only=True)
class Rendezvous:
    """How a rank finds and recognises the others, and when they exchange without some.

    Attributes:
        rank: number of this rank.
        world_size: number of ranks if none is lost.
        store: rendezvous store that all ranks can reach, also those that start later.
        host: this machine's address as others see it.
        digest: identifies the run; a rank of another run is refused.
        timeout_s: longest wait for the first start of all ranks, or for a quorum, in seconds.
        quorum: smallest number of ranks for an exchange.
        deadline_s: seconds that a quorum of ready ranks waits for the others.
        interval: steps between two exchanges.
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
        """Return the longest wait in a sum, after which the others repeat it before the launcher ends a silent run."""
        return self.timeout_s / 2


@dataclasses.dataclass(frozen=True)
class Participants:
    """The ranks that take part in an exchange, in order; another generation means new connections between them."""

    generation: int
    ranks: Sequence[int]


class Membership(abc.ABC):
    """One rank's view of who takes part in the exchanges.

    Attributes:
        num_lost, num_returned: how many times a rank was lost or left out, and joined again; known to rank 0.
    """

    num_lost = 0
    num_returned = 0

    @abc.abstractmethod
    def join(self) -> bytes | None:
        """Join the run; return the state from which this rank starts, or None on rank 0, which begins the run.

        Raises:
            MembershipError: the ranks did not start in time, or rank 0 refuses this one.
            TransportError: rank 0 does not answer.
        """

    @abc.abstractmethod
    def begin(self, exchange: int, steps: int) -> Participants:
        """Announce that this rank is ready for an exchange, and return who takes part in it.

        Args:
            exchange: number of the exchange.
            steps: steps that this rank has made since it joined.

        Raises:
            MembershipError: this rank came too late, or fewer ranks than the quorum are left.
            RunEnded: rank 0 has ended the run.
            TransportError: rank 0 is lost.
        """

    @abc.abstractmethod
    def agree(self, problem: str | None) -> bool:
        """Return True if the sum succeeded on all members that are still there; otherwise call `begin` again.

        Args:
            problem: why it failed on this rank; None if it succeeded. The errors are those of `begin`.
        """

    def admit(self) -> None:  # noqa: B027 - the task of rank 0
        """Send the state to the ranks that wait to join; call this after an exchange."""

    @abc.abstractmethod
    def share_figures(self, step: int, own: dict[str, Any], steps: int) -> tuple[list[dict[str, Any]], int]:
        """Send this rank's figures to rank 0, which returns those of all ranks that are there, its own first.

        Other ranks return their own. Figures that do not come within the deadline are left out.

        Args:
            step: the step of the run that the figures are of.
            own: values that JSON can hold.
            steps: steps that this rank has made since it joined.

        Returns:
            The figures, and the steps of the ranks that are lost or late, as far as they have told rank 0.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the run; rank 0 ends it for the others, too."""

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Close all channels without a message, as the end of the process does."""


class Member(Membership):
    """Any rank but 0: follow the decisions of rank 0.

    Args:
        rendezvous: how to find rank 0.
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
            with contextlib.suppress(ConnectionError):  # rank 0 may have said why before it closed the connection
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
        except (OSError, ValueError, RecursionError) as error:  # closed, or another program's nonsense
            raise self._lost(error) from error

    def _obeyed(self, message: MembershipMessage) -> MembershipMessage:
        """Return a message of rank 0, unless it says that this rank takes part no longer."""
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
    """Connect to rank 0; try again until a time of `time.monotonic`, because this rank's own link may come back."""
    while True:
        try:
            return socket.create_connection(address, CONNECT_S)
        except ConnectionRefusedError:  # rank 0 has ended
            raise
        except OSError:
            if time.monotonic() >= limit:
                raise
        time.sleep(RETRY_S)
