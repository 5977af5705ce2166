"""Estimate how often the intervals and verdicts of `bench compare` are right, from simulated runs with a known truth.

    python benchmarks/coverage.py [--simulations 4000]

Times to target are log-normal, and runs with the same seed share part of their variance. A given share of the seeds
misses the target: the budget is the corresponding quantile of the times. The second part simulates step speeds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Iterator

from bench.report.comparison import SAME_FACTOR
from bench.report.statistics import improvement, judge
from bench.report.targets import Need, gain

NORMAL = statistics.NormalDist()
MANY = 200_000  # seeds from which the true value is computed, because there is no formula for it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulations", type=int, default=4000)
    simulations = parser.parse_args().simulations
    source = random.Random(1)
    print("coverage of the 95 % interval of the speed-up to a target, up to the common budget")
    for (missed, slow_down, shared), num_seeds in itertools.product(
        [((0.0, 0.0), 1.0, 0.5), ((0.3, 0.3), 1.0, 0.0), ((0.3, 0.3), 1.0, 0.5), ((0.0, 0.3), 1.0, 0.5),
         ((0.3, 0.3), 1.2, 0.5)],
        (3, 5, 10),
    ):  # fmt: skip
        covered = coverage(source, simulations, num_seeds, missed=missed, slow_down=slow_down, shared=shared)
        print(
            f"  {num_seeds:2} seeds, {missed[0]:.0%} / {missed[1]:.0%} missed, {slow_down:.1f}x slower, "
            f"{shared:.0%} of the variance common to a seed: {covered:.1%}"
        )
    print("verdicts on the speed of a step at a scatter of 3 % and 5 seeds")
    for slow_down in (1.0, 1.1):
        flagged = share_flagged(source, simulations, slow_down)
        print(f"  truly {slow_down - 1.0:.0%} slower: called slower or faster in {flagged:.1%}")


def coverage(
    source: random.Random,
    simulations: int,
    num_seeds: int,
    *,
    missed: tuple[float, float],
    slow_down: float,
    shared: float,
    scatter: float = 0.15,
) -> float:
    """Return the share of simulated comparisons whose interval contains the true value.

    A comparison without an interval counts as not containing it.

    Args:
        source: source of random numbers.
        simulations: number of simulated comparisons.
        num_seeds: seeds per comparison.
        missed: shares of the seeds that miss the target, of baseline and candidate.
        slow_down: factor by which the candidate is slower.
        shared: share of the variance that runs with the same seed have in common.
        scatter: standard deviation of the logarithm of a time to target.
    """
    budgets = [
        math.exp(quantile(1.0 - share, scatter)) * factor
        for share, factor in zip(missed, (1.0, slow_down), strict=True)
    ]
    budget = min(budgets)
    pairs = list(itertools.islice(times(source, slow_down, shared, scatter), MANY))
    truth = statistics.fmean(math.log(min(a, budget) / min(b, budget)) for a, b in pairs)
    covered = 0
    for _ in range(simulations):
        sides = seeds(times(source, slow_down, shared, scatter), num_seeds, budgets)
        effect = gain(*sides)
        covered += bool(effect and effect.low and effect.high and effect.low <= math.exp(truth) <= effect.high)
    return covered / simulations


def share_flagged(source: random.Random, simulations: int, slow_down: float) -> float:
    """Return the share of comparisons, of five step speeds per side, whose verdict is faster or slower."""
    flagged = 0
    for _ in range(simulations):
        baseline = [math.exp(source.gauss(0.0, 0.03)) for _ in range(5)]
        candidate = [math.exp(source.gauss(0.0, 0.03)) / slow_down for _ in range(5)]
        effect = improvement(baseline, candidate, higher_is_better=True)
        assert effect is not None
        flagged += judge(effect, same=SAME_FACTOR, p=effect.p) in ("above", "below")
    return flagged / simulations


def times(source: random.Random, slow_down: float, shared: float, scatter: float) -> Iterator[tuple[float, float]]:
    """Yield times to target of a baseline and a candidate with the same seed, without end."""
    while True:
        common = math.sqrt(shared) * source.gauss(0.0, scatter)
        own = [common + math.sqrt(1.0 - shared) * source.gauss(0.0, scatter) for _ in range(2)]
        yield math.exp(own[0]), math.exp(own[1]) * slow_down


def seeds(pairs: Iterator[tuple[float, float]], num_seeds: int, budgets: list[float]) -> list[list[Need]]:
    """Return the needs of each seed, of baseline and candidate."""
    drawn = list(itertools.islice(pairs, num_seeds))
    return [
        [
            Need(seed=seed, amount=pair[side] if pair[side] < budget else None, budget=budget)
            for seed, pair in enumerate(drawn)
        ]
        for side, budget in enumerate(budgets)
    ]


def quantile(share: float, scatter: float) -> float:
    """Return the logarithm that this share of the times does not exceed."""
    return math.inf if share == 1.0 else scatter * NORMAL.inv_cdf(share)


if __name__ == "__main__":
    main()
