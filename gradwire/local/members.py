"""`Members`: who takes part in the exchanges of local steps."""

import abc
from collections.abc import Callable
from typing import Any, Protocol

from typing_extensions import override

from collectives.base import Collective
from collectives.transport.base import Transport
from compressors.layer import Step
from gradwire.exchange.report import Bucket
from gradwire.local.fragments import FragmentExchange


class RankSteps(Protocol):
    """The part of `LocalSteps` that `Members` may use."""

    transport: Transport

    @property
    def num_steps(self) -> int:
        """Return the step of the run that this rank has done."""

    def connect(self, collective: Collective, open_transport: Callable[[], Transport]) -> None:
        """Close all connections, and exchange through others from now on."""

    def average_once_(self, exchange: FragmentExchange, step: Step) -> Bucket:
        """Average the difference and the buffers over ranks, and propose residuals."""

    def drop(self) -> None:
        """Discard the residuals that were proposed."""

    def shared_state(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks."""

    def take_over(self, state: dict[str, Any], number: int) -> None:
        """Begin with this state, right before the exchange of this number."""


class Members(abc.ABC):
    """Who takes part in the exchanges of `LocalSteps`: all ranks (`FixedMembers`), or those that are there.

    Attributes:
        collective, transport: those with which `LocalSteps` begins.
    """

    collective: Collective
    transport: Transport

    @abc.abstractmethod
    def join(self, local: RankSteps, while_waiting: Callable[[], None], has_joined: Callable[[], None]) -> int:
        """Join the run before the first step; return the step of the run from which this rank trains.

        Args:
            local: this rank's steps, which may take over the state of the others.
            while_waiting: called at least once a second while this rank waits for ranks that may be lost.
            has_joined: called after the first exchange of a rank that may be lost.
        """

    @abc.abstractmethod
    def average_(self, local: RankSteps, exchange: FragmentExchange, step: Step) -> Bucket:
        """Call `local.average_once_` until all that take part have the mean."""

    def admit(self) -> None:  # noqa: B027 - optional
        """Let the ranks that wait take part from now on; called after an exchange."""

    def close(self) -> None:  # noqa: B027 - optional
        """Leave the run."""


class FixedMembers(Members):
    """All ranks take part in every exchange, and the loss of one ends the run.

    Args:
        collective: sums payloads.
        transport: connects the ranks; with a delay, a thread uses it during training.
    """

    def __init__(self, collective: Collective, transport: Transport) -> None:
        self.collective, self.transport = collective, transport

    @override
    def join(self, local: RankSteps, while_waiting: Callable[[], None], has_joined: Callable[[], None]) -> int:
        return 0

    @override
    def average_(self, local: RankSteps, exchange: FragmentExchange, step: Step) -> Bucket:
        return local.average_once_(exchange, step)
