"""`LocalStepsBySpeed`: between two exchanges, every rank makes as many steps as it can in a given time.

At an exchange the ranks tell each other how long their steps and the previous exchange took. Every rank then computes
the same plan: how many steps each rank makes until the next exchange, so that all ranks reach it at the same time. The
mean of the ranks' parameter changes is weighted by these numbers of steps. A slow link delays all ranks equally, so it
makes exchanges rarer, but does not reduce the number of steps of the rank with that link.

Source: McMahan et al. 2017 (federated averaging, arXiv:1602.05629), whose mean is weighted by each client's samples.
Differs: the number of samples of a rank follows from its measured speed. Wang et al. 2020 (FedNova, arXiv:2007.07481)
show that ranks that make more steps then pull the model towards their own data, which matters if the ranks' data
differ.
"""

import heapq
import time
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from gradwire.local.exchange import LocalSteps

# Steps of each rank before the first exchange, when no speed is known.
FIRST_STEPS = 5
# Between two exchanges, ranks compute at least this many times as long as an exchange takes. So even on a slow link,
# exchanges add at most a fifth to the time.
COMPUTE_PER_EXCHANGE = 5


def planned_steps(step_s: Sequence[float], seconds: float, left: int) -> list[int]:
    """Return how many steps each rank makes until the next exchange: at least 1 each, and at most `left` together.

    The `left` steps are divided into equal intervals of at least `seconds`, if there are enough steps.

    Args:
        step_s: the seconds that a step takes on each rank.
        seconds: the shortest time until the next exchange.
        left: number of steps that all ranks together may still make, at least one per rank. The plan uses all of these
            steps, or leaves at least one per rank.
    """
    ranks = range(len(step_s))
    speed = sum(1 / each for each in step_s)  # of all ranks together
    possible = max(len(ranks), round(seconds * speed))
    total = left // max(1, left // possible)
    steps = [max(1, int(total / speed / each)) for each in step_s]
    next_ends = [((steps[rank] + 1) * step_s[rank], rank) for rank in ranks]
    heapq.heapify(next_ends)
    for _ in range(total - sum(steps)):  # a step goes to the rank that would finish it first
        _, rank = next_ends[0]
        steps[rank] += 1
        heapq.heapreplace(next_ends, ((steps[rank] + 1) * step_s[rank], rank))
    while sum(steps) > total:
        steps[max(ranks, key=lambda rank: steps[rank] * step_s[rank] * (steps[rank] > 1))] -= 1  # the last to finish
    return steps


class LocalStepsBySpeed(LocalSteps):
    """Local steps with steps=auto: a rank's number of steps between exchanges depends on its speed.

    One step of the run means `world_size` steps of single ranks, whichever ranks make them. Call `plan` before each
    step of this rank.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made = 0  # steps of this rank since the last exchange
        self._planned = [0] * self.transport.world_size  # steps of every rank between the last exchange and the next
        self._made_by_all = 0  # number of steps of all ranks together until the last exchange
        self._step_s: list[float] = []  # of every rank: seconds per step before the last exchange; empty at first
        self._exchange_s = 0.0  # duration of the last exchange on this rank, without waiting for late ranks
        self._seconds = self.options.seconds  # shortest time until the next exchange
        self._timed_since = 0.0

    def plan(self, stop_at: int) -> None:
        """Plan the steps until the next exchange, if the coming step is the first one after an exchange.

        Args:
            stop_at: the step of the run after which an exchange must take place, because ranks stop there together.
        """
        if self._made == 0:
            world_size = self.transport.world_size
            left = stop_at * world_size - self._made_by_all
            known = self._step_s or [self._seconds / FIRST_STEPS] * world_size
            self._planned = planned_steps(known, self._seconds, left)
            self._weight = self._planned[self.transport.rank] * world_size / sum(self._planned)
            self._timed_since = time.perf_counter()

    @property
    @override
    def period(self) -> int:
        return self._planned[self.transport.rank]

    @property
    def num_steps(self) -> int:
        """Return the number of steps of the run so far; between exchanges, estimated from this rank's progress."""
        since = sum(self._planned) * self._made // self.period if self._made else 0
        return (self._made_by_all + since) // self.transport.world_size

    @override
    @torch.no_grad()
    def after_update(self) -> None:
        self.guard.index += 1
        self._made += 1
        if self._made == self.period:
            self._compare_speeds()
            started = time.perf_counter()
            self._begin()
            self._end()
            self._exchange_s = time.perf_counter() - started
            self._made_by_all += sum(self._planned)
            self._made = 0
        elif self._made == 1:  # the first step is not timed, because its batch was loaded earlier
            self._timed_since = time.perf_counter()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank needs to resume; call this method right after an exchange."""
        own = {"step_s": self._step_s, "seconds": self._seconds, "exchange_s": self._exchange_s}
        return super().state_dict() | own | {"made_by_all": self._made_by_all}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._step_s, self._seconds, self._exchange_s = state["step_s"], state["seconds"], state["exchange_s"]
        self._made_by_all = state["made_by_all"]

    def _compare_speeds(self) -> None:
        device = self.transport.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        step_s = (time.perf_counter() - self._timed_since) / max(1, self._made - 1)
        own = [step_s if rank == self.transport.rank else 0.0 for rank in range(self.transport.world_size)]
        with self.exchanging():  # waits for all ranks, so that the exchange begins everywhere at once
            *self._step_s, exchange_s = self.transport.all_reduce_scalars([*own, self._exchange_s], "max")
        self._seconds = max(self.options.seconds, COMPUTE_PER_EXCHANGE * exchange_s)
