"""Figures: what is computed from the runs of a sweep, each with its 95 % interval over seeds."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

from bench.report.configurations import Configuration
from bench.report.formats import format_factor, format_points, format_value
from bench.report.runs import Run, collect_runs, one_per_seed
from bench.report.statistics import difference, estimate, improvement
from bench.report.store import Row
from bench.report.store import read as read_rows
from bench.report.targets import BYTES, TIME, Need, Target, common_budget, gain, needs, num_reached

Which = Mapping[str, Any]
"""The value of each column that tells a configuration from the others of its sweep; ``twobit:*`` has any options."""

Unit = Literal["points", "factor", "share"]
UNIT_OF = {TIME: "train_time_s", BYTES: "payload_bytes_per_step"}
"""A column in whose unit a need is written."""


class Missing(Exception):
    """The rows lack what a figure needs; the sentence says what."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured figure.

    Attributes:
        value: percentage points as a share, a factor, or a share.
        low, high: its 95 % interval over seeds; None with one seed, or equal ones too few to tell.
        n: seeds.
        unit: how it is written.
        note: what else must be known to read it.
        decides: False where its interval says more than the runs do, so that no verdict follows.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    unit: Unit
    note: str = ""
    decides: bool = True

    @property
    def text(self) -> str:
        """The value with its interval."""
        write, after = _WRITE[self.unit], _AFTER[self.unit]
        interval = "" if self.low is None or self.high is None else f" [{write(self.low)}, {write(self.high)}]"
        return f"{write(self.value)}{interval}{after}"

    def __str__(self) -> str:
        seeds = "one seed" if self.n == 1 else f"{self.n} seeds"
        return "; ".join(filter(None, (f"{self.text}, {seeds}", self.note)))


_WRITE: dict[Unit, Callable[[float], str]] = {
    "points": format_points,
    "factor": format_factor,
    "share": lambda value: f"{100 * value:.1f}",
}
_AFTER: dict[Unit, str] = {"points": " points", "factor": "x", "share": " %"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRuns:
    """The runs of one sweep, as its CSV file holds them."""

    path: Path
    rows: list[Row]
    runs: list[Run]

    @classmethod
    def read(cls, path: Path) -> Self:
        """All of the file; nothing where there is none."""
        rows = read_rows([path]) if path.is_file() else []
        runs, _ = one_per_seed(collect_runs(rows))
        return cls(path=path, rows=rows, runs=runs)

    def by_seed(self, which: Which) -> dict[int, Run]:
        """The runs of one configuration that ended well.

        Raises:
            Missing: there is none.
        """
        fitting = self._fitting(which)
        found = {run["seed"]: run for run in fitting if run.ended_well}
        if not found:
            state = "every one failed" if fitting else "no row"
            raise Missing(f"{state}: {which_text(which)}")
        if len({run["config_id"] for run in fitting}) > 1:
            raise ValueError(f"{which_text(which)} names several configurations of {self.path}")
        return found

    def num_failed(self, which: Which) -> int:
        """How many seeds of one configuration did not end well; figures leave them out."""
        return sum(not run.ended_well for run in self._fitting(which))

    def _fitting(self, which: Which) -> list[Run]:
        return [run for run in self.runs if all(_fits(run[name], value) for name, value in which.items())]

    def pairs(self, which: Which, than: Which) -> list[tuple[Run, Run]]:
        """The runs of both configurations, one pair per seed that both have.

        Raises:
            Missing: there is none.
        """
        ours, theirs = self.by_seed(which), self.by_seed(than)
        both = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        if not both:
            raise Missing(f"no seed has both {which_text(which)} and {which_text(than)}")
        return both


class Measure(Protocol):
    """How a figure is computed."""

    @property
    def unit(self) -> Unit:
        """Of the figure."""

    @property
    def sides(self) -> Sequence[Which]:
        """The configurations whose runs it is computed from."""

    def of(self, runs: SweepRuns) -> Figure:
        """The figure.

        Raises:
            Missing: the rows lack what it needs.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean:
    """A share, mean over seeds."""

    unit: ClassVar[Unit] = "share"
    which: Which
    value: Callable[[Run], float | None]

    @property
    def sides(self) -> Sequence[Which]:
        """Its own."""
        return (self.which,)

    def of(self, runs: SweepRuns) -> Figure:
        found = estimate(_known([self.value(run) for run in runs.by_seed(self.which).values()], self.which))
        assert found is not None
        return Figure(value=found.mean, low=found.low, high=found.high, n=found.n, unit=self.unit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """An accuracy less another one's, paired by seed."""

    unit: ClassVar[Unit] = "points"
    which: Which
    than: Which
    column: str = "test_accuracy"

    @property
    def sides(self) -> Sequence[Which]:
        """Both."""
        return self.which, self.than

    def of(self, runs: SweepRuns) -> Figure:
        ours, theirs = _sides(runs, self.which, self.than, lambda run: run[self.column])
        found = difference(theirs, ours, paired=True)
        assert found is not None
        return Figure(value=found.value, low=found.low, high=found.high, n=len(ours), unit=self.unit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
    """How many times as much of something as another configuration, or as little, paired by seed.

    Attributes:
        counted: figures that repeat exactly, whatever the seed.
    """

    unit: ClassVar[Unit] = "factor"
    which: Which
    than: Which
    value: Callable[[Run], float | None]
    higher_is_better: bool
    counted: bool = False

    @property
    def sides(self) -> Sequence[Which]:
        """Both."""
        return self.which, self.than

    def of(self, runs: SweepRuns) -> Figure:
        ours, theirs = _sides(runs, self.which, self.than, self.value)
        found = improvement(theirs, ours, higher_is_better=self.higher_is_better, paired=True, counted=self.counted)
        if found is None:
            raise Missing(f"a value is 0: {which_text(self.which)}")
        return Figure(value=found.value, low=found.low, high=found.high, n=len(ours), unit=self.unit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gain:
    """How many times less of a budget is needed until the target accuracy, misses counted as `bench compare` does.

    Attributes:
        metric: `TIME` or `BYTES`.
        accuracy: the target; None: the one that the runs were given.
    """

    unit: ClassVar[Unit] = "factor"
    which: Which
    than: Which
    metric: str
    accuracy: float | None = None

    @property
    def sides(self) -> Sequence[Which]:
        """Both."""
        return self.which, self.than

    def of(self, runs: SweepRuns) -> Figure:
        than, ours = (
            needs(
                Configuration(label={}, runs=list(runs.by_seed(which).values())),
                self.metric,
                Target(accuracy=self.accuracy),
            )
            for which in (self.than, self.which)
        )
        found = gain(than, ours)
        if found is None:
            raise Missing("no seed of either side reached the target")
        budget = common_budget(than, ours)
        better = ours if found.value > 1.0 else than
        return Figure(
            value=found.value,
            low=found.low,
            high=found.high,
            n=min(len(than), len(ours)),
            unit=self.unit,
            note=self._cut(budget, than, ours),
            decides=num_reached(better, budget) == len(better),
        )

    def _cut(self, budget: float, than: Sequence[Need], ours: Sequence[Need]) -> str:
        """What is known only up to the smallest budget, where a seed missed the target."""
        if math.isinf(budget):
            return ""
        counts = (f"{num_reached(side, budget)} of {len(side)}" for side in (than, ours))
        return f"up to {format_value(UNIT_OF[self.metric], budget)}, where {' and '.join(counts)} seeds had reached it"


def faster(which: Which, than: Which) -> Factor:
    """Samples per second over another configuration's."""
    return Factor(which=which, than=than, value=lambda run: run["samples_per_s"], higher_is_better=True)


def fewer_bytes(which: Which, than: Which, column: str = "payload_bytes_per_step") -> Factor:
    """Another configuration's bytes per step over this one's."""
    return Factor(which=which, than=than, value=lambda run: run[column], higher_is_better=False, counted=True)


def step_s(run: Run) -> float | None:
    """Mean time of a step."""
    if not run["samples_per_s"]:
        return None
    return float(run["world_size"] * run["batch_size"] * (run["accumulate"] or 1) / run["samples_per_s"])


def waiting_share(run: Run) -> float | None:
    """Share of a step in which a rank waits for the exchange after backward's own work has ended."""
    step, exposed = run["step_time_s"], run["exposed_s"]
    return None if not step or exposed is None else float(exposed / step)


def waiting_percent(run: Run) -> float | None:
    """`waiting_share` in percent."""
    share = waiting_share(run)
    return None if share is None else 100.0 * share


def mean_kilobytes(run: Run) -> float | None:
    """Gradient bytes per step over the whole training, in kB: more than the last epoch's where density warms up."""
    steps = [0, *(row["step"] for row in run.rows)]
    sent = [row["payload_bytes_per_step"] for row in run.rows]
    if None in steps or None in sent:
        return None
    total = sum((now - before) * each for before, now, each in zip(steps, steps[1:], sent, strict=False))
    return float(total / steps[-1] / 1000)


def in_unit(value: float, unit: Unit) -> str:
    """A number of this unit as figures are written."""
    return f"{_WRITE[unit](value)}{_AFTER[unit]}"


def times_one_node(run: Run) -> float | None:
    """How many times as many samples as one node would do that never waits for the others."""
    share = waiting_share(run)
    return None if share is None else float(run["world_size"]) * (1.0 - share)


def which_text(which: Which) -> str:
    """A configuration in words."""
    return ", ".join(f"{name} {format_value(name, value)}" for name, value in which.items())


def _fits(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) and "*" in wanted:
        return fnmatch.fnmatchcase(str(found), wanted)
    return bool(found == wanted)


def _sides(
    runs: SweepRuns, which: Which, than: Which, value: Callable[[Run], float | None]
) -> tuple[list[float], list[float]]:
    ours, theirs = zip(*runs.pairs(which, than), strict=True)
    return _known([value(run) for run in ours], which), _known([value(run) for run in theirs], than)


def _known(values: Sequence[float | None], which: Which) -> list[float]:
    known = [float(value) for value in values if value is not None]
    if len(known) < len(values):
        raise Missing(f"not measured: {which_text(which)}")
    return known
