"""The line that is shown after every seed: the verdicts so far, and the time that is left."""

from collections.abc import Sequence

from bench.core.units import format_seconds
from bench.deciding.answer import factor_of
from bench.deciding.decision import MethodDecision, seeds_in_words

# Two estimates that differ by less than this factor are shown as one.
_ALIKE = 1.2


def state(num_seeds: int, decisions: Sequence[MethodDecision]) -> str:
    """Return one line with the number of seeds so far, and the current factor and verdict of every method."""
    factors = ["target missed" if each.factor is None else factor_of(each) for each in decisions]
    parts = [f"{each.method} {factor} {each.verdict}" for each, factor in zip(decisions, factors, strict=True)]
    return f"{seeds_in_words(num_seeds)}: {'; '.join(parts)}"


def time_left(fewest: int, most: int, *, seed_s: float, budget_s: float, rest_s: float) -> str:
    """Return an estimate of the time until the answer, such as "about 40 s to 3 min 2 s left".

    Args:
        fewest: smallest number of further seeds.
        most: largest number of further seeds; 0 if all methods are decided.
        seed_s: seconds of one seed.
        budget_s: seconds after which no seed is added.
        rest_s: seconds of everything else: timing steps, and the check.
    """
    least_s, most_s = (rest_s + min(number * seed_s, max(0.0, budget_s)) for number in (fewest, most))
    longest = f" to {format_seconds(round(most_s))}" if most_s > _ALIKE * least_s else ""
    return f"about {format_seconds(round(least_s))}{longest} left"
