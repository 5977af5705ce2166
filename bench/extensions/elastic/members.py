"""`ElasticMembers`: ranks that train with local steps may be lost and return.

An exchange averages the parameter differences of the ranks that are present (`membership.py`). If a member is lost
before all members have the sum, the others repeat the exchange with the same differences. Once all remaining members
have the sum, they update their outer copies (the parameters that all ranks share) and keep the new residuals. So outer
copies stay equal bit for bit.

Source: Douillard et al. 2024 (asynchronous local SGD, arXiv:2401.09135) for workers that come and go; torchft (PyTorch)
for a quorum that is agreed upon before every exchange of DiLoCo.
Differs: a rank that starts receives the outer copy, the outer optimizer's state and the buffers, but no inner optimizer
state and no residual; rank 0 alone decides who takes part, so the run ends if rank 0 is lost.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore
from typing_extensions import override

from bench.extensions.elastic.coordinator import Coordinator
from bench.extensions.elastic.membership import Member, Membership, Participants, Rendezvous
from collectives.allreduce import Ring
from collectives.base import Collective
from collectives.transport.base import SingleRank, TransportError
from collectives.transport.sockets import connect_ranks
from compressors.layer import Step
from gradwire.exchange.packed_state import pack_state, unpack_state
from gradwire.exchange.report import Bucket
from gradwire.local.exchange import LocalSteps, Members
from gradwire.local.fragments import FragmentExchange

# Seconds within which the members must connect. All members are ready, so a member that does not connect is lost.
CONNECT_WITHIN_S = 10.0


class ElasticMembers(Members):
    """The ranks of a run with local steps in which ranks may be lost and return.

    Args:
        collective: sums the payloads of the ranks that take part.
        rendezvous: tells how to find the other ranks, and gives quorum and deadline.

    Attributes:
        membership: decides which ranks take part in exchanges; set by `join`.
    """

    membership: Membership

    def __init__(self, collective: Collective, rendezvous: Rendezvous) -> None:
        # Before the first exchange nothing is summed; `_connect` binds `collective` to the ranks that take part.
        self.collective, self.transport = Ring(), SingleRank()
        self._unbound, self._rendezvous = collective, rendezvous
        self._generation = 0  # number of the current connections to other ranks

    @override
    def join(self, local: LocalSteps, while_waiting: Callable[[], None], has_joined: Callable[[], None]) -> int:
        """Join the run; return the index of the step from which this rank trains.

        Raises:
            MembershipError: the ranks did not start in time, or rank 0 refuses this rank.
            TransportError: rank 0 does not answer.
        """
        rendezvous, ledger = self._rendezvous, self.transport.ledger
        self._local, self._has_joined = local, has_joined

        def state_before(exchange: int) -> bytes:
            return pack_state(local.shared_state() | {"exchange": exchange}).numpy().tobytes()

        if rendezvous.rank == 0:
            self.membership = Coordinator(rendezvous, ledger, state=state_before, while_waiting=while_waiting)
        else:
            self.membership = Member(rendezvous, ledger)
        try:
            packed = self.membership.join()
        except Exception:
            self.membership.disconnect()
            raise
        if packed is not None:
            state = unpack_state(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
            local.take_over(state, state["exchange"])
        self._first_step = local.num_steps
        return self._first_step

    @property
    def _steps_here(self) -> int:
        """Return the number of steps that this rank has made since it joined."""
        return self._local.num_steps - self._first_step

    def share_figures(self, own: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
        """Call `Membership.share_figures` with this rank's figures after its latest step."""
        return self.membership.share_figures(self._local.num_steps, own, self._steps_here)

    @override
    def average_(self, local: LocalSteps, exchange: FragmentExchange, step: Step) -> Bucket:
        difference, buffers = exchange.mean.clone(), [buffer.clone() for buffer in exchange.buffers]
        while True:
            participants = self.membership.begin(exchange.number, self._steps_here)
            exchange.mean.copy_(difference)
            for buffer, before in zip(exchange.buffers, buffers, strict=True):
                buffer.copy_(before)
            problem = None
            try:
                self._connect(local, participants)
                rank, world_size = local.transport.rank, local.transport.world_size
                bucket = local.average_once_(exchange, dataclasses.replace(step, rank=rank, world_size=world_size))
            except TransportError as error:
                problem = str(error)
            if self.membership.agree(problem):
                return bucket
            local.drop()

    @override
    def admit(self) -> None:
        self.membership.admit()
        if self._steps_here == self._rendezvous.interval:  # this rank has ended its first exchange
            self._has_joined()

    @override
    def close(self) -> None:
        self.membership.close()

    def _connect(self, local: LocalSteps, participants: Participants) -> None:
        """Connect this rank to the other ranks that take part, unless they are connected already."""
        if participants.generation == self._generation:
            return
        self._generation = participants.generation
        timeout_s = self._rendezvous.sum_timeout_s
        open_transport = functools.partial(
            connect_ranks,
            PrefixStore(f"gradwire/members/{participants.generation}", self._rendezvous.store),
            self._rendezvous.rank,
            participants.ranks,
            self._rendezvous.host,
            timeout_s=timeout_s,
            connect_s=min(CONNECT_WITHIN_S, timeout_s),
            ledger=self.transport.ledger,
        )
        local.connect(self._unbound, open_transport)
