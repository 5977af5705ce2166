"""Predict steps in which ranks push to a server and do not wait for each other, from simulations.

With bounded staleness, a rank that starts sending slightly earlier gets a larger share of the link, so its lead grows
until it reaches the bound. From then on, every rank waits for the slowest rank's push in each step, and all continue
together. The simulation therefore runs these ranks in lockstep, as with a bound of 0, and the prediction adds the bound
to the staleness of all ranks but one.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

import numpy as np

from bench.core.errors import UsageError
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.links import Floats
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.server_simulation import AsyncSetting, Played, Simulation, StepWork
from collectives.parameter_server.link import CONTROL_BYTES

MOST_RANKS = 512
# Number of random start times, one per rank, over all simulations together: the fewer ranks, the more simulations.
STARTS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncPrediction(Prediction):
    """A step, with the column names of `metrics.csv`: times are rank 0's, other values cover all ranks' steps.

    Attributes:
        staleness_mean, staleness_max: number of versions by which gradients were behind the parameters when applied.
        updates_per_s: updates of the server's parameters per second.
        bound_by: as in `Prediction`, or server if the server is nearly always busy.
        step_times_s: median step time of each rank, in seconds; for a rank that ended no step while steps were
            counted, the time that it computes in one.
    """

    staleness_mean: float
    staleness_max: int
    updates_per_s: float
    step_times_s: tuple[float, ...]


def check_size(num_ranks: int) -> None:
    """Check that there are few enough ranks for a simulation, which would otherwise take minutes.

    Raises:
        UsageError: more ranks than can be simulated.
    """
    if num_ranks > MOST_RANKS:
        raise UsageError(f"{num_ranks} ranks of async_server cannot be simulated; choose at most {MOST_RANKS}")


def predict_async(calibration: Calibration, setting: AsyncSetting) -> AsyncPrediction:
    """Predict a step from simulations; with few ranks, from several simulations with different start times.

    Raises:
        UsageError: more ranks than can be simulated.
    """
    n = setting.links.num_ranks
    check_size(n)
    draw = np.random.default_rng(setting.seed)
    in_step = dataclasses.replace(setting, strategy=dataclasses.replace(setting.strategy, staleness=0))
    work = StepWork.of(calibration, in_step)
    played = [Simulation(in_step, work, draw).run() for _ in range(max(1, STARTS // n))]
    return _summed_up(calibration, setting, _Stock(calibration, in_step, work, played))


class _Stock:
    """Totals over all simulations of a setting.

    Attributes:
        steps: number of steps that each rank ended, float [ranks].
        step_s, exposed_s: seconds of each of these steps, one list per rank.
        staleness: staleness of every push, in versions of the parameters.
        seconds: simulated time; longer if the shared cores need more time for the work of all ranks.
        stretch: the factor by which `seconds` is longer, at least 1.
        serving_share: share of the simulated time in which the server was busy.
        updates: number of updates of the parameters.
        sent: bytes that each rank sent, without control messages, float [ranks].
        cpu_s: CPU seconds of each rank, float [ranks].
    """

    def __init__(
        self, calibration: Calibration, setting: AsyncSetting, work: StepWork, played: Sequence[Played]
    ) -> None:
        self.work = work
        self.step_s = _joined([each.step_s for each in played])
        self.exposed_s = _joined([each.exposed_s for each in played])
        self.steps = np.array([len(of_rank) for of_rank in self.step_s], dtype=float)
        self.staleness = [behind for each in played for behind in each.staleness]
        self.updates = sum(each.updates for each in played)
        seconds, serving_s = (sum(each.ended - each.begun for each in played), sum(each.serving_s for each in played))
        self.serving_share = serving_s / seconds
        self.remote = np.arange(len(self.steps)) != setting.strategy.root
        pushed, answered = sum(work.nbytes) - CONTROL_BYTES, work.answer_nbytes - CONTROL_BYTES
        self.sent = np.where(self.remote, pushed * self.steps, answered * self.steps[self.remote].sum())
        own_s = work.computing.cpu_s - calibration.update_s + sum(work.encode_s)
        messages_s = np.where(self.remote, sum(work.message_s) + work.answer_s, 0.0)
        self.cpu_s: Floats = self.steps * (own_s + messages_s) + np.where(self.remote, 0.0, serving_s)
        hosts = setting.links.host_of
        steps_over_links = self.steps[hosts != hosts[setting.strategy.root]].sum()
        carried_s = setting.links.carry_byte_s * steps_over_links * (pushed + answered)
        self.stretch = 1.0
        if setting.shared_cores is not None:
            self.stretch = max(1.0, (float(self.cpu_s.sum()) + carried_s) / (setting.shared_cores * seconds))
        self.seconds = self.stretch * seconds

    @property
    def pushes_per_s(self) -> float:
        """Return the steps of all ranks together per second."""
        return len(self.staleness) / self.seconds

    def step_times_s(self) -> tuple[float, ...]:
        """Return each rank's median step time in seconds; for a rank that ended no step, the time that it computes."""
        return tuple(
            self.stretch * float(statistics.median(of_rank) if of_rank else computed_s)
            for of_rank, computed_s in zip(self.step_s, self.work.computing.computed_s, strict=True)
        )

    def per_step(self, values: Floats) -> Floats:
        """Divide each rank's values by its number of steps."""
        each: Floats = values / np.maximum(1.0, self.steps)
        return each


def _joined(lists: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Concatenate each rank's lists from several simulations."""
    return [list(itertools.chain.from_iterable(of_rank)) for of_rank in zip(*lists, strict=True)]


def _summed_up(calibration: Calibration, setting: AsyncSetting, stock: _Stock) -> AsyncPrediction:
    n, work = len(stock.steps), stock.work
    nbytes, step_times_s = float(stock.sent.sum() / stock.steps.sum()), stock.step_times_s()
    waited_s = statistics.fmean(stock.exposed_s[0]) if stock.exposed_s[0] else 0.0
    return AsyncPrediction(
        step_time_s=step_times_s[0],
        exposed_s=waited_s + step_times_s[0] * (1 - 1 / stock.stretch),
        encode_s=float(work.computing.factor[0]) * sum(work.encode_s),
        cpu_s_per_step=float(stock.per_step(stock.cpu_s).mean()),
        samples_per_s=calibration.batch_size * stock.pushes_per_s,
        payload_bytes_per_step=nbytes,
        payload_bytes_max_per_step=float(stock.per_step(stock.sent).max()),
        messages_per_step=2 * work.num_layers * float(stock.steps[stock.remote].sum() / stock.steps.sum()),
        dense_bytes_per_step=calibration.dense_nbytes,
        compression_ratio=2 * (n - 1) / n * calibration.dense_nbytes / nbytes if nbytes else None,
        bound_by=_bound_by(setting, stock),
        staleness_mean=statistics.fmean(stock.staleness) + setting.strategy.staleness * (n - 1) / n,
        staleness_max=max(stock.staleness) + setting.strategy.staleness,
        updates_per_s=stock.updates / stock.seconds,
        step_times_s=step_times_s,
    )


def _bound_by(setting: AsyncSetting, stock: _Stock) -> str:
    """Return what limits the steps: cpu, compute, server or network."""
    if stock.stretch > 1:
        return "cpu"
    work, root = stock.work, setting.strategy.root
    alone_s = work.computing.computed_s + float(work.computing.factor[root]) * work.apply_s
    possible = (1 / alone_s).sum() if setting.strategy.mode == "asp" else len(alone_s) / alone_s.max()
    if stock.pushes_per_s > possible / 1.1:
        return "compute"
    return "server" if stock.serving_share > 0.9 else "network"
