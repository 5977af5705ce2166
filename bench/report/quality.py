"""Define what measures a trained model: its test accuracy or, for a text, its bits per byte.

Reports, decisions and pictures ask a `Quality` for the direction, the margin, the formats and the words.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from bench.report.columns import format_number
from bench.report.statistics import Effect, SeedRule, difference

_YARDSTICKS = ("gzip", "bz2", "xz")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """One measure of trained models.

    A change from a baseline is a difference of accuracies, as a share; or the relative difference of bits per byte,
    which is computed from ratios. Both are shown in hundredths: in points, or in per cent of the baseline.

    Attributes:
        name: the name in columns, options and JSON, such as ``accuracy`` in ``test_accuracy`` and ``target_accuracy``.
        is_share: True if values are shares of 1, which are shown in per cent and compared by difference; False if they
            are compared by ratio.
        higher_is_better: True if a higher value is better.
        largest: the largest possible value and target.
        worst: the value of a model that predicts nothing.
        same: lowest and highest change that make no practical difference.
        verdicts: the verdict on a change above `same`, and on one below.
        beyond: where values lie that are worse than a limit.
        noun: the name in headings, as in "accuracy unclear".
        singular, plural: the value of one model, and of several, as in "the accuracy of one rank's model".
        title: the quantity on the axis of a picture and above a table.
        headings: headings of tables: of the mean, and of the mean with its change, in which ``{}`` is the baseline.
        units: the unit of changes beside a number, and in words.
        comparatives: the start of a verdict on a better, an equal and a worse row.
        than: joins a better row to the baseline.
        worse: follows the amount of a loss, as in "2 points less accurate".
        no_worse, but_worse, and_no_worse: what joins a verdict on speed to that on quality.
        kept: ends the question of a report.
        gated: follows the change of a row that crosses a limit.
        gate: an example of a limit for ``--fail-on``.
        relax: what to do with a target that is not reached.
        example: a target.
        target: what ``--target`` takes.
        fewer: the amount that leaves a relative target reachable.
    """

    name: Literal["accuracy", "bits_per_byte"]
    is_share: bool
    higher_is_better: bool
    largest: float
    worst: float
    same: tuple[float, float]
    verdicts: tuple[Literal["higher", "worse"], Literal["lower", "better"]]
    beyond: Literal["below", "above"]
    noun: str
    singular: str
    plural: str
    title: str
    headings: tuple[str, str]
    units: tuple[str, str]
    comparatives: tuple[str, str, str]
    than: str
    worse: str
    no_worse: str
    but_worse: str
    and_no_worse: str
    kept: str
    gated: str
    gate: str
    relax: str
    example: str
    target: str
    fewer: str

    @property
    def column(self) -> str:
        """The column of metrics.csv with the values."""
        return f"test_{self.name}"

    @property
    def target_column(self) -> str:
        """The column, and the setting of a run, with the run's own target."""
        return f"target_{self.name}"

    @property
    def target_flag(self) -> str:
        """The option that gives a run a target."""
        return f"--{self.target_column.replace('_', '-')}"

    def reaches(self, value: float | None, target: float) -> bool:
        """Return True if a value is known and at least as good as the target."""
        return value is not None and self.cost(value) <= self.cost(target)

    def cost(self, value: float) -> float:
        """Return a value or a change with the sign that makes lower better."""
        return -value if self.higher_is_better else value

    def scaled(self, value: float) -> float:
        """Return a value on the scale on which values are subtracted: itself, or its logarithm."""
        return value if self.is_share else math.log(value)

    def change(self, scaled: float) -> float:
        """Return the change that a difference of `scaled` values stands for; infinite if the difference is."""
        return scaled if self.is_share or math.isinf(scaled) else math.expm1(scaled)

    def effect(
        self, baseline: Sequence[float], candidate: Sequence[float], *, paired: bool = False, rule: SeedRule = "fixed"
    ) -> Effect | None:
        """Return the mean change from baseline to candidate with its interval, as `statistics.difference` does."""
        if not self.is_share and min((*baseline, *candidate), default=1.0) <= 0.0:
            return None
        sides = [[self.scaled(value) for value in values] for values in (baseline, candidate)]
        effect = difference(*sides, paired=paired, rule=rule)
        if effect is None:
            return None
        low, high = (None if bound is None else self.change(bound) for bound in (effect.low, effect.high))
        return Effect(value=self.change(effect.value), low=low, high=high, p=effect.p)

    def change_between(self, baseline: float, candidate: float) -> float:
        """Return the change from one value to another."""
        return self.change(self.scaled(candidate) - self.scaled(baseline))

    def worsened(self, value: float, amount: float) -> float:
        """Return the value that is worse by an amount: a share, such as 0.01 for one point or per cent."""
        return value - amount if self.is_share else value * (1.0 + amount)

    def format(self, value: float, decimals: int = 2) -> str:
        """Return a value such as ``97.20%``, or ``2.103``, which has one decimal more."""
        return f"{value:.{decimals}%}" if self.is_share else f"{value:.{decimals + 1}f}"

    def in_words(self, value: float, decimals: int = 1) -> str:
        """Return a value such as ``97.2%``, or ``2.10 bits per byte``."""
        return self.format(value, decimals) + ("" if self.is_share else f" {self.noun}")

    def in_table(self, value: float) -> str:
        """Return a mean or a standard deviation such as ``97.2``, or ``2.103``."""
        return f"{value * 100:.1f}" if self.is_share else f"{value:.3f}"

    def target_title(self, target: float) -> str:
        """Return a target such as ``97.5 %``, or ``2.10 bits per byte``, with at least two decimals."""
        if self.is_share:
            return f"{format_number(target * 100)} %"
        return f"{max(format_number(target), f'{target:.2f}', key=len)} {self.noun}"

    def amount(self, number: str) -> str:
        """Return an amount of change with its unit: ``1 point``, ``0.5 points`` or ``0.5 %``."""
        return f"{number} {self.units[0].removesuffix('s') if number == '1' else self.units[0]}"

    def loss(self, change: float) -> str:
        """Return a change for the worse in words: ``2 points less accurate``, or ``0.4 % more bits per byte``."""
        return f"{self.amount(f'{100.0 * abs(change):.1f}'.removesuffix('.0'))} {self.worse}"


ACCURACY = Quality(
    name="accuracy",
    is_share=True,
    higher_is_better=True,
    largest=1.0,
    worst=0.0,
    same=(-0.01, 0.01),
    verdicts=("higher", "lower"),
    beyond="below",
    noun="accuracy",
    singular="accuracy",
    plural="accuracies",
    title="test accuracy",
    headings=("accuracy\n% ± sd", "accuracy %\n(vs {})"),
    units=("points", "percentage points"),
    comparatives=("More accurate", "As accurate", "Less accurate"),
    than="more accurate than",
    worse="less accurate",
    no_worse="no less accurate",
    but_worse="but less accurate",
    and_no_worse="and not less accurate",
    kept="without losing accuracy",
    gated="points of accuracy",
    gate="accuracy:-0.5",
    relax="lower --target-accuracy",
    example="0.9",
    target="an accuracy such as 0.9, or best-1: one point below the baseline",
    fewer="fewer points",
)

BITS_PER_BYTE = Quality(
    name="bits_per_byte",
    is_share=False,
    higher_is_better=False,
    largest=8.0,
    worst=8.0,
    same=(-0.01, 0.01),
    verdicts=("worse", "better"),
    beyond="above",
    noun="bits per byte",
    singular="number of bits per byte",
    plural="numbers of bits per byte",
    title="bits per byte of the held-out text",
    headings=("bits per byte\n± sd", "bits per byte\n(% vs {})"),
    units=("%", "per cent"),
    comparatives=("Fewer bits per byte", "As many bits per byte", "More bits per byte"),
    than="better in bits per byte than",
    worse="more bits per byte",
    no_worse="no more bits per byte",
    but_worse="but with more bits per byte",
    and_no_worse="with no more bits per byte",
    kept="without needing more bits per byte",
    gated="% bits per byte",
    gate="bits_per_byte:+1%",
    relax="raise --target-bits-per-byte",
    example="2.1",
    target="bits per byte such as 2.1, or best-1: one per cent above the baseline",
    fewer="less",
)


def quality_of(rows: Iterable[Mapping[str, Any]]) -> Quality:
    """Return what measures the models of these rows: bits per byte for texts, except for runs to a target accuracy.

    Args:
        rows: rows of metrics.csv of runs on the same data set, or other values by such names; a value may be missing.
    """
    listed = list(rows)
    is_text, is_to_accuracy = (
        any(row.get(name) is not None for row in listed for name in names)
        for names in ((BITS_PER_BYTE.column, BITS_PER_BYTE.target_column), (ACCURACY.target_column,))
    )
    return BITS_PER_BYTE if is_text and not is_to_accuracy else ACCURACY


def yardsticks(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return what general compressors need for the rows' held-out text; empty if there is none, or more than one."""
    listed = list(rows)
    known = {name: {row.get(f"{name}_bits_per_byte") for row in listed} - {None} for name in _YARDSTICKS}
    texts = [f"{name} {values.pop():.2f}" for name, values in known.items() if len(values) == 1]
    return f"the whole held-out text: {', '.join(texts)} bits per byte" if texts else ""
