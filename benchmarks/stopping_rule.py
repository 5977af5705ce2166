"""Simulate how often the rule of `bench decide` errs, and how many seeds it takes.

    python benchmarks/stopping_rule.py [--decisions 20000] [--out results/reference/stopping_rule.csv]

Each decision adds seeds, up to 20, until the rule has a verdict. A seed's log times of baseline and candidate are
independent draws with a standard deviation of 5 %; every run is 2 % slower than the one before it, and the order of a
seed's two runs is random. The effect is the mean log ratio in standard deviations of the log ratio. In rows with a
shared error, all log ratios of a decision share a normal error with a standard deviation of 1.5 %, and the rule widens
its interval accordingly, with a fifth of alpha.
"""

import argparse
import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import special

from bench.report.anytime import judge_log_ratios

ALPHA, MAX_SEEDS, SAME = 0.05, 20, math.log(1.03)
DEVIATION, DRIFT, SHARED = 0.05, 0.02, 0.015
DRAWS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "Laplace": lambda rng, shape: rng.laplace(size=shape) / math.sqrt(2),
    "t3": lambda rng, shape: rng.standard_t(3, shape) / math.sqrt(3),
    # Normal, but the target is only known to be reached at an evaluation; evaluations are 0.6 deviations apart.
    "rounded": lambda rng, shape: 0.6 * np.round(rng.standard_normal(shape) / 0.6),
    "lognormal": lambda rng, shape: (rng.lognormal(size=shape) - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--out", type=Path, help="CSV file for the rows")
    options = parser.parse_args()
    settings = itertools.product((1, 4), (0.0, SHARED), DRAWS, (0.0, 1.0, 2.0, 4.0))
    rows = pd.DataFrame([simulate(*setting, decisions=options.decisions) for setting in settings])
    print(rows.to_string(index=False))
    if options.out:
        rows.to_csv(options.out, index=False, lineterminator="\n")


def simulate(candidates: int, shared: float, draw: str, effect: float, *, decisions: int) -> dict[str, object]:
    """Return the shares of verdicts, and the mean number of seeds; `candidates` divide the probability of error."""
    rng = np.random.default_rng(1)
    times = DEVIATION * DRAWS[draw](rng, (2, decisions, MAX_SEEDS))
    order = rng.choice((-1.0, 1.0), (decisions, MAX_SEEDS))
    error = shared * rng.standard_normal((decisions, 1))
    ratios = times[0] - times[1] + order * DRIFT + error + effect * math.hypot(DEVIATION, DEVIATION, DRIFT)
    alpha = ALPHA / candidates
    for_seeds, for_shared = (0.8 * alpha, 0.2 * alpha) if shared else (alpha, 1.0)
    width = shared * -special.ndtri(for_shared / 2)
    ends = [first_verdict(row, for_seeds, width) for row in ratios.tolist()]
    verdicts = [verdict for verdict, _ in ends]
    return {
        "candidates": candidates,
        "shared_error": shared,
        "draws": draw,
        "effect": effect,
        **{name: verdicts.count(name) / decisions for name in ("above", "below", "same", "unclear")},
        "mean_seeds": round(sum(seeds for _, seeds in ends) / decisions, 2),
    }


def first_verdict(ratios: list[float], alpha: float, shared_error: float) -> tuple[str, int]:
    """Return the first verdict other than "unclear", and after how many seeds it came."""
    for seeds in range(2, MAX_SEEDS + 1):
        verdict = judge_log_ratios(ratios[:seeds], alpha=alpha, same=SAME, shared_error=shared_error)
        if verdict != "unclear":
            return verdict, seeds
    return "unclear", MAX_SEEDS


if __name__ == "__main__":
    main()
