"""Declare the measures of a trained model: its test accuracy, the bits per byte of a text, or a third party's metric.

A `Metric` tells reports, decisions and pictures its direction, format and noun; they write their own sentences.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from bench.core import registry
from bench.core.schema import METRICS_BY_NAME
from bench.report.columns import format_number
from bench.report.statistics import Effect, SeedRule, difference

SAME_CHANGE = (-0.01, 0.01)  # changes in this range make no practical difference
_YARDSTICKS = ("gzip", "bz2", "xz")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One measure of trained models; packages add their own by an entry point of the group ``bench.metrics``.

    The change of a share from a baseline is a difference, shown in percentage points. The change of any other value is
    relative: it is computed from ratios, and shown in per cent of the baseline.

    Attributes:
        column: the column of metrics.csv with the values, such as ``test_accuracy``; its declaration says whether
            higher values are better.
        noun: the name in sentences and headings.
        is_share: True if values are shares of 1, which are shown in per cent.
        largest: the largest possible value.
        decimals: number of decimals of a value that is not a share.
    """

    column: str
    noun: str
    is_share: bool = False
    largest: float = math.inf
    decimals: int = 3

    @property
    def name(self) -> str:
        """The name in options and JSON, such as ``accuracy`` in ``target_accuracy``."""
        return self.column.removeprefix("test_")

    @property
    def target_column(self) -> str:
        """The name shared by the column and the option with a run's target in this metric; some metrics have none."""
        return f"target_{self.name}"

    @property
    def target_flag(self) -> str:
        """The command-line option that sets a run's target in this metric."""
        return f"--{self.target_column.replace('_', '-')}"

    @property
    def higher_is_better(self) -> bool:
        """True if a higher value is better."""
        return METRICS_BY_NAME[self.column].better == "higher"

    @property
    def unit(self) -> str:
        """The unit of changes: points, or per cent of the baseline."""
        return "points" if self.is_share else "%"

    @property
    def beyond(self) -> Literal["below", "above"]:
        """The side of a limit on which worse values lie: ``below`` or ``above``."""
        return "below" if self.higher_is_better else "above"

    @property
    def gate(self) -> str:
        """An example of a limit on this metric for option ``--fail-on``, such as ``accuracy:-0.5``."""
        return f"{self.name}:{'-' if self.higher_is_better else '+'}{'0.5' if self.is_share else '1%'}"

    def reaches(self, value: float | None, target: float) -> bool:
        """Return True if a value is known and at least as good as the target."""
        return value is not None and self.cost(value) <= self.cost(target)

    def cost(self, value: float) -> float:
        """Return a value or a change as a cost (lower is better): negated if higher values are better."""
        return -value if self.higher_is_better else value

    def scaled(self, value: float) -> float:
        """Return a value on the scale on which differences are computed: a share itself, otherwise its logarithm."""
        return value if self.is_share else math.log(value)

    def change(self, scaled: float) -> float:
        """Convert a difference of two `scaled` values to a change; an infinite difference stays infinite."""
        return scaled if self.is_share or math.isinf(scaled) else math.expm1(scaled)

    def effect(
        self, baseline: Sequence[float], candidate: Sequence[float], *, paired: bool = False, rule: SeedRule = "fixed"
    ) -> Effect | None:
        """Return the mean change from baseline to candidate with its interval, as `statistics.difference` does."""
        if not self.is_share and min((*baseline, *candidate), default=1.0) <= 0.0:
            return None
        sides = [[self.scaled(value) for value in values] for values in (baseline, candidate)]
        effect = difference(*sides, paired=paired, rule=rule)
        return effect.on_scale(self.change) if effect else None

    def format(self, value: float) -> str:
        """Return a value such as ``97.20%`` or ``2.103``."""
        return f"{value:.2%}" if self.is_share else f"{value:.{self.decimals}f}"

    def in_words(self, value: float) -> str:
        """Return a value such as ``97.5 %`` or ``2.1 bits per byte``."""
        return f"{format_number(value * 100)} %" if self.is_share else f"{format_number(value)} {self.noun}"

    def in_table(self, value: float) -> str:
        """Return a mean or a standard deviation such as ``97.2`` or ``2.103``."""
        return f"{value * 100:.1f}" if self.is_share else self.format(value)

    def amount(self, number: str) -> str:
        """Return an amount of change with its unit: ``1 point``, ``0.5 points`` or ``0.5 %``."""
        return f"{number} {self.unit.removesuffix('s') if number == '1' else self.unit}"


ACCURACY = Metric(column="test_accuracy", noun="accuracy", is_share=True, largest=1.0)
BITS_PER_BYTE = Metric(column="test_bits_per_byte", noun="bits per byte", largest=8.0)


@functools.cache
def metrics() -> tuple[Metric, ...]:
    """Return all metrics: bits per byte, then accuracy (a text has both), then the metrics of other packages."""
    added = registry.load_plugins("metrics", Metric)
    for lacking in [each for each in added if each.column not in METRICS_BY_NAME]:
        registry.warn_once(f"left out: the metric {lacking.noun}, because metrics.csv has no column {lacking.column}")
        added.remove(lacking)
    return (BITS_PER_BYTE, ACCURACY, *added)


def quality_of(rows: Iterable[Mapping[str, Any]]) -> Metric:
    """Return the metric that measures the models in these rows.

    This is the metric of the runs' target; without a target, a metric with values in the rows.

    Args:
        rows: rows of metrics.csv from runs on one data set, or other mappings with the same keys; keys may be missing.
    """
    listed = list(rows)

    def is_known(name: str) -> bool:
        return any(row.get(name) is not None for row in listed)

    asked = [metric for metric in metrics() if is_known(metric.target_column)]
    measured = [metric for metric in metrics() if is_known(metric.column)]
    return [*asked[::-1], *measured, ACCURACY][0]


def yardsticks(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the bits per byte of gzip, bz2 and xz on the held-out text; empty unless all rows have the same text."""
    listed = list(rows)
    known = {name: {row.get(f"{name}_bits_per_byte") for row in listed} - {None} for name in _YARDSTICKS}
    texts = [f"{name} {values.pop():.2f}" for name, values in known.items() if len(values) == 1]
    return f"the whole held-out text: {', '.join(texts)} bits per byte" if texts else ""
