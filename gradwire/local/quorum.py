"""`LocalStepsWithQuorum`: local steps of ranks that may be lost and return.

An exchange takes place among the ranks that are there (`membership.py`), and the mean is that of their differences. If
a member is lost before all have the sum, the others repeat the exchange from the same differences. Once all of them
have the sum, they move their outer copies and accept their residuals. So outer copies stay equal bit for bit.

Source: Douillard et al. 2024 (asynchronous local SGD, arXiv:2401.09135) for workers that come and go; torchft (PyTorch)
for a quorum that is agreed upon before every exchange of DiLoCo.
Differs: a rank that starts takes over the outer copy with its optimizer's state and buffers, and no inner optimizer
state or residual; rank 0 decides alone who takes part, so the run ends if rank 0 is lost.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from typing_extensions import override

from collectives.allreduce import Ring
from collectives.base import Collective
from collectives.transport.base import SingleRank, TransportError
from collectives.transport.sockets import connect_ranks
from compressors.base import Compressor
from compressors.layer import Step
from gradwire.exchange.packed_state import pack_state, unpack_state
from gradwire.exchange.report import Bucket
from gradwire.local.coordinator import Coordinator
from gradwire.local.exchange import Exchange, LocalSteps
from gradwire.local.membership import Member, Members, Membership, Rendezvous
from gradwire.local.options import LocalOptions
from gradwire.step_guard import Nonfinite

# Seconds for the members to connect; all are ready, so one that does not connect is lost.
CONNECT_WITHIN_S = 10.0


class LocalStepsWithQuorum(LocalSteps):
    """Local steps of ranks that may be lost and return; the options have a quorum.

    Call `join` before the first step.

    Args:
        model: the network; `join` replaces its parameters and buffers with those of the outer copy, except on rank 0.
        rendezvous: how to find the other ranks. The other arguments are those of `LocalSteps`.

    Attributes:
        first_step: the step of the run from which this rank trains.
        membership: who takes part in the exchanges; set by `join`.
    """

    membership: Membership
    first_step = 0

    def __init__(
        self,
        model: nn.Module,
        options: LocalOptions,
        compressor: Compressor,
        collective: Collective,
        rendezvous: Rendezvous,
        *,
        nonfinite: Nonfinite = "skip",
    ) -> None:
        # Before the first exchange nothing is summed; `_connect` binds `collective` to the members.
        super().__init__(model, options, compressor, Ring(), SingleRank(), nonfinite=nonfinite)
        self._unbound, self._rendezvous = collective, rendezvous
        self._generation = 0  # of the connections to the other members

    def join(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Join the run; `first_step` then says at which step.

        Args:
            while_waiting: called at least once a second while rank 0 waits for others.

        Raises:
            MembershipError: the ranks did not start in time, or rank 0 refuses this one.
            TransportError: rank 0 does not answer.
        """
        rendezvous, ledger = self._rendezvous, self.transport.ledger
        if rendezvous.rank == 0:
            self.membership = Coordinator(
                rendezvous, self.options, ledger, state=self._state_before, while_waiting=while_waiting
            )
        else:
            self.membership = Member(rendezvous, ledger)
        try:
            state = self.membership.join()
        except Exception:
            self.membership.disconnect()
            raise
        if state is not None:
            self._take_over(unpack_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)))
        self.first_step = self._steps

    @property
    def num_steps(self) -> int:
        """Return the step of the run that this rank has done."""
        return self._steps

    @property
    def steps_here(self) -> int:
        """Return the steps that this rank has made since it joined."""
        return self._steps - self.first_step

    @override
    def close(self) -> None:
        super().close()
        self.membership.close()

    @override
    def _average_(self, exchange: Exchange, step: Step) -> Bucket:
        difference, buffers = exchange.mean.clone(), [buffer.clone() for buffer in exchange.buffers]
        while True:
            members = self.membership.begin(exchange.number, self.steps_here)
            exchange.mean.copy_(difference)
            for buffer, before in zip(exchange.buffers, buffers, strict=True):
                buffer.copy_(before)
            problem = None
            try:
                self._connect(members)
                rank, world_size = self.transport.rank, self.transport.world_size
                bucket = super()._average_(exchange, dataclasses.replace(step, rank=rank, world_size=world_size))
            except TransportError as error:
                problem = str(error)
            if self.membership.agree(problem):
                return bucket
            self.drop()

    @override
    def _end(self) -> None:
        super()._end()
        self.membership.admit()

    def _connect(self, members: Members) -> None:
        """Connect this rank to the other members and bind the collective to them, unless that was done before."""
        if members.generation == self._generation:
            return
        self._generation = members.generation
        for bound in (self.collective, *self._others):
            bound.close()
        self._others.clear()
        self.transport.close()
        self.transport = connect_ranks(
            PrefixStore(f"gradwire/members/{members.generation}", self._rendezvous.store),
            self._rendezvous.rank,
            members.ranks,
            self._rendezvous.host,
            timeout_s=self._rendezvous.sum_timeout_s,
            connect_s=min(CONNECT_WITHIN_S, self._rendezvous.sum_timeout_s),
            ledger=self.transport.ledger,
        )
        self.collective = self._unbound.bind(self.transport, self._sum_encoder)
        self._plain = self.bind(Ring())

    def _state_before(self, exchange: int) -> bytes:
        """Return the state from which a rank starts, whose first exchange has this number."""
        state = {
            "exchange": exchange,
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            "buffers": self._outer_buffers,
            "memory": self.reducer.memory.state_dict(),  # parts of it are equal on all ranks, as in PowerSGD
        }
        return pack_state(state).numpy().tobytes()

    @torch.no_grad()
    def _take_over(self, state: dict[str, Any]) -> None:
        self._number = state["exchange"]
        self._steps = self._number * self.options.interval
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
            fragment.adopt()
        self._adopt_buffers(state["buffers"])
        self.reducer.memory.load_state_dict(state["memory"])
