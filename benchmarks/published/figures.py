"""Compute figures from the runs of a sweep, each with a 95 % interval that stays valid when seeds are added."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

from bench.report.anytime import interval
from bench.report.columns import format_factor, format_points, format_value
from bench.report.groups import RunGroup
from bench.report.statistics import CONFIDENCE, difference, improvement
from bench.report.store import Row, Run, collect_runs, one_per_seed
from bench.report.store import read as read_rows
from bench.report.targets import BYTES, TIME, Need, Target, common_budget, gain, needs, num_reached

# The values of the columns that identify a configuration in its sweep; ``twobit:*`` matches any options.
Which = Mapping[str, Any]

Unit = Literal["points", "factor", "share"]
UNIT_OF = {TIME: "train_time_s", BYTES: "payload_bytes_per_step"}  # columns with the unit of a need


class Missing(Exception):
    """The rows lack what a figure needs; the message says what."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured figure.

    Attributes:
        value: a difference of shares ("points"), a factor, or a share.
        low, high: the 95 % interval over seeds, which is valid after each added seed; None with too few seeds.
        n: number of seeds.
        unit: the unit, which decides the format.
        note: a remark on how to read the figure.
        decides: False if no verdict may follow from the interval, because the better side missed the target.
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
        """Read the sweep's CSV file; without a file there are no runs."""
        rows = read_rows([path]) if path.is_file() else []
        runs, _ = one_per_seed(collect_runs(rows))
        return cls(path=path, rows=rows, runs=runs)

    def by_seed(self, which: Which) -> dict[int, Run]:
        """Return the successful runs of one configuration, by seed.

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
        """Return how many seeds of one configuration failed; figures leave them out."""
        return sum(not run.ended_well for run in self._fitting(which))

    def _fitting(self, which: Which) -> list[Run]:
        return [run for run in self.runs if fits(run.last_known, which)]

    def pairs(self, which: Which, than: Which) -> list[tuple[Run, Run]]:
        """Return the runs of both configurations, one pair per common seed.

        Raises:
            Missing: there is none.
        """
        ours, theirs = self.by_seed(which), self.by_seed(than)
        both = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        if not both:
            raise Missing(f"no seed has both {which_text(which)} and {which_text(than)}")
        return both


class Measure(Protocol):
    """A way to compute a figure."""

    @property
    def unit(self) -> Unit:
        """The unit of the figure."""

    @property
    def sides(self) -> Sequence[Which]:
        """The configurations whose runs the figure is computed from."""

    def of(self, runs: SweepRuns) -> Figure:
        """Compute the figure.

        Raises:
            Missing: the rows lack what it needs.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean:
    """The mean of a share over seeds."""

    unit: ClassVar[Unit] = "share"
    which: Which
    value: Callable[[Run], float | None]

    @property
    def sides(self) -> Sequence[Which]:
        return (self.which,)

    def of(self, runs: SweepRuns) -> Figure:
        values = _known([self.value(run) for run in runs.by_seed(self.which).values()], self.which)
        low, high = interval(values, 1.0 - CONFIDENCE)
        is_known = low > -math.inf
        return Figure(
            value=statistics.fmean(values),
            low=low if is_known else None,
            high=high if is_known else None,
            n=len(values),
            unit=self.unit,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """An accuracy minus that of another configuration, paired by seed."""

    unit: ClassVar[Unit] = "points"
    which: Which
    than: Which
    column: str = "test_accuracy"

    @property
    def sides(self) -> Sequence[Which]:
        return self.which, self.than

    def of(self, runs: SweepRuns) -> Figure:
        ours, theirs = _sides(runs, self.which, self.than, lambda run: run[self.column])
        found = difference(theirs, ours, paired=True, rule="anytime")
        assert found is not None
        return Figure(value=found.value, low=found.low, high=found.high, n=len(ours), unit=self.unit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
    """The factor by which a value is better than that of another configuration, paired by seed.

    Attributes:
        counted: True for counts that do not depend on the seed.
    """

    unit: ClassVar[Unit] = "factor"
    which: Which
    than: Which
    value: Callable[[Run], float | None]
    higher_is_better: bool
    counted: bool = False

    @property
    def sides(self) -> Sequence[Which]:
        return self.which, self.than

    def of(self, runs: SweepRuns) -> Figure:
        ours, theirs = _sides(runs, self.which, self.than, self.value)
        found = improvement(
            theirs, ours, higher_is_better=self.higher_is_better, paired=True, counted=self.counted, rule="anytime"
        )
        if found is None:
            raise Missing(f"a value is 0: {which_text(self.which)}")
        return Figure(value=found.value, low=found.low, high=found.high, n=len(ours), unit=self.unit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gain:
    """The factor by which less time or bytes are needed to the target, with missed targets as in `bench compare`.

    Attributes:
        metric: `TIME` or `BYTES`.
        accuracy: the target; None: the target that the runs were given.
    """

    unit: ClassVar[Unit] = "factor"
    which: Which
    than: Which
    metric: str
    accuracy: float | None = None

    @property
    def sides(self) -> Sequence[Which]:
        return self.which, self.than

    def of(self, runs: SweepRuns) -> Figure:
        than, ours = (
            needs(
                RunGroup(label={}, runs=list(runs.by_seed(which).values())),
                self.metric,
                Target(self.accuracy),
            )
            for which in (self.than, self.which)
        )
        found = gain(than, ours, "anytime")
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
        """Return a note on the common budget, if a seed missed the target."""
        if math.isinf(budget):
            return ""
        counts = (f"{num_reached(side, budget)} of {len(side)}" for side in (than, ours))
        return f"up to {format_value(UNIT_OF[self.metric], budget)}, where {' and '.join(counts)} seeds had reached it"


def faster(which: Which, than: Which) -> Factor:
    """Measure samples per second over those of another configuration."""
    return Factor(which=which, than=than, value=lambda run: run["samples_per_s"], higher_is_better=True)


def fewer_bytes(which: Which, than: Which, column: str = "payload_bytes_per_step") -> Factor:
    """Measure the bytes per step of another configuration over those of this one."""
    return Factor(which=which, than=than, value=lambda run: run[column], higher_is_better=False, counted=True)


def step_s(run: Run) -> float | None:
    """Return the mean time of a step, computed from samples per second."""
    if not run["samples_per_s"]:
        return None
    return float(run["world_size"] * run["batch_size"] * (run["accumulate"] or 1) / run["samples_per_s"])


def waiting_share(run: Run) -> float | None:
    """Return the share of a step in which a rank waits for the exchange after its backward has ended."""
    step, exposed = run["step_time_s"], run["exposed_s"]
    return None if not step or exposed is None else float(exposed / step)


def waiting_percent(run: Run) -> float | None:
    share = waiting_share(run)
    return None if share is None else 100.0 * share


def mean_kilobytes(run: Run) -> float | None:
    """Return the gradient bytes per step over the whole training in kB, which includes a density warm-up."""
    steps = [0, *(row["step"] for row in run.rows)]
    sent = [row["payload_bytes_per_step"] for row in run.rows]
    if None in steps or None in sent:
        return None
    total = sum((now - before) * each for before, now, each in zip(steps, steps[1:], sent, strict=False))
    return float(total / steps[-1] / 1000)


def in_unit(value: float, unit: Unit) -> str:
    """Format a number as figures of this unit are."""
    return f"{_WRITE[unit](value)}{_AFTER[unit]}"


def which_text(which: Which) -> str:
    return ", ".join(f"{name} {format_value(name, value)}" for name, value in which.items())


def fits(columns: Mapping[str, Any], which: Which) -> bool:
    """Return True if these values of columns are those of the configuration."""
    return all(
        fnmatch.fnmatchcase(str(columns[name]), value)
        if isinstance(value, str) and "*" in value
        else columns[name] == value
        for name, value in which.items()
    )


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
