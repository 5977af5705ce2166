"""Compare each method with the baseline in time to the target and in quality, seed by seed, and decide.

With each seed, the time to the target is composed: every step of the seed's trajectory counts with the measured
duration of such a step on the link, and the extra time of the first steps is added. All seeds share these measured step
times, so the error of the step times widens the interval of the ratio; a part of alpha is reserved for this error.
`benchmarks/decision_error.py` simulates how often the verdicts are wrong.
"""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from bench.deciding.step_times import LinkStepTimes
from bench.deciding.study import DecideConfig
from bench.deciding.trajectory import Trajectory
from bench.report.anytime import interval, judge_log_ratios
from bench.report.quality import Metric, quality_of
from bench.report.statistics import Effect, two_sided_quantile

TimeVerdict = Literal["faster", "slower", "same", "missed", "open"]
AccuracyVerdict = Literal["within", "below", "above", "open"]

# Share of alpha, the probability of a wrong verdict, that is reserved for the error of the step times.
SHARED_PART = 0.2
# A method that has missed the target with this number of seeds, and never reached it, gets no more seeds.
ENOUGH_MISSES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedTime:
    """The time that one seed needed to reach the target.

    Attributes:
        seed: the seed.
        seconds: seconds of training until the target, or of the whole training if the target was missed.
        reached: True if the seed reached the target.
        origin: "composed" from a trajectory and step times, or "measured" in a whole run on the link.
        num_steps: number of optimizer steps in this time.
    """

    seed: int
    seconds: float
    reached: bool
    origin: Literal["composed", "measured"]
    num_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """The measurements of one method.

    Attributes:
        method: name of the method.
        trajectories: the finished trainings without the link, one per seed.
        step_times: the duration of the method's steps on the link; None if the times come from `whole_runs`.
        whole_runs: trainings on the link, one per seed.
    """

    method: str
    trajectories: list[Trajectory]
    step_times: LinkStepTimes | None = None
    whole_runs: list[Trajectory] = dataclasses.field(default_factory=list)

    @property
    def quality(self) -> Metric:
        """The measure of the trained models: accuracy or bits per byte."""
        return quality_of(each.run.last_known for each in self.trajectories)

    @property
    def times(self) -> list[SeedTime]:
        """The time that each seed needed to reach the target."""
        timed = [(run, run.train_time_s) for run in self.whole_runs]
        if self.step_times is not None:
            timed = [(each, each.start_s + self.step_times.training_s(each.steps)) for each in self.trajectories]
        return [
            SeedTime(
                seed=each.seed,
                seconds=seconds,
                reached=each.num_to_target is not None,
                origin="measured" if self.step_times is None else "composed",
                num_steps=sum(each.steps.values()),
            )
            for each, seconds in timed
        ]

    @property
    def steps(self) -> Counter[float]:
        """How many steps all seeds together made until the target, by the number of bytes sent in such a step."""
        return sum((each.steps for each in self.trajectories), Counter())


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodDecision:
    """The comparison of one method with the baseline over the seeds so far.

    Attributes:
        method: name of the method.
        num_seeds: number of seeds with which the method was trained.
        num_missed: number of these seeds with which the method missed the target.
        factor: how many times sooner the method reaches the target than the baseline: geometric mean over the seeds
            of both with which the baseline reached the target, with bounds if there are enough seeds. None if the
            method missed the target with all of these seeds.
        verdict: the conclusion about the time; "missed" if the baseline reached the target with at least
            `ENOUGH_MISSES` seeds, and the method missed the target with all of these seeds.
        accuracy: mean change of the final quality from the baseline, as `Metric` defines it: a difference of
            accuracies as a share, or a relative difference of bits per byte; None if no seed has both values.
        accuracy_verdict: "within" if the loss of quality is at most the accepted loss; "below" (accuracy) or "above"
            (bits per byte) if it is larger; "open" if this is not yet clear.
    """

    method: str
    num_seeds: int
    num_missed: int
    factor: Effect | None
    verdict: TimeVerdict
    accuracy: Effect | None
    accuracy_verdict: AccuracyVerdict


def log_ratios(baseline: Sequence[SeedTime], candidate: Sequence[SeedTime]) -> list[float]:
    """Return log(baseline's time / candidate's time) for each seed with which both were trained.

    Seeds with which the baseline missed the target are left out. If only the candidate missed the target with a seed,
    the log ratio of this seed is at most 0; it is below 0 if the candidate trained for longer than the baseline needed.
    """
    ours = {each.seed: each for each in candidate}
    pairs = [(each, ours[each.seed]) for each in baseline if each.reached and each.seed in ours]
    ratios = [(math.log(theirs.seconds / own.seconds), own.reached) for theirs, own in pairs]
    return [ratio if reached else min(0.0, ratio) for ratio, reached in ratios]


def shared_error(baseline: Evidence, candidate: Evidence, alpha: float) -> float:
    """Return a bound on the error of the mean log ratio that comes from errors in the measured step times.

    Both methods were timed in the same jobs. Each job gives one ratio, log(baseline's time / candidate's time), for an
    average training over the candidate's seeds. The bound is the half width of Student's interval of the mean over
    jobs. Only the number of jobs counts, not the number of blocks in a job, because the blocks of a job are not
    independent: they share processes and memory, and run within the same minute. The bound holds if the number of jobs
    does not depend on what they measured. The bound is 0 if the times come from whole runs, and infinite if there is
    only one job.

    Args:
        baseline: the measurements of the baseline.
        candidate: the measurements of the method.
        alpha: probability that the error is larger than the bound.
    """
    theirs, ours = baseline.step_times, candidate.step_times
    if theirs is None or ours is None:
        return 0.0
    seeds = {each.seed for each in candidate.trajectories}
    common = dataclasses.replace(baseline, trajectories=[each for each in baseline.trajectories if each.seed in seeds])
    steps, own_steps = common.steps, candidate.steps
    jobs = range(len(theirs.seconds))
    ratios = [math.log(theirs.training_s(steps, job) / ours.training_s(own_steps, job)) for job in jobs]
    if len(ratios) < 2:
        return math.inf
    return two_sided_quantile(alpha, len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))


def decide(
    baseline: Evidence,
    candidate: Evidence,
    rule: DecideConfig,
    num_candidates: int = 1,
    *,
    step_times_are_exact: bool = False,
) -> MethodDecision:
    """Return the decision about the candidate that the seeds so far allow.

    Args:
        baseline: the measurements of the baseline.
        candidate: the measurements of the method.
        rule: the rule of the decision: range of equal times, accepted loss, and probability of a wrong verdict.
        num_candidates: number of methods that are compared with the baseline; they share the probability of error.
        step_times_are_exact: ignore the error of the step times, to see whether the seeds would be enough.
    """
    alpha, margin = rule.alpha / num_candidates, rule.accuracy_margin / 100.0
    error = 0.0 if step_times_are_exact else shared_error(baseline, candidate, alpha * SHARED_PART)
    for_seeds = alpha * (1.0 - SHARED_PART) if error else alpha
    base_times, times = baseline.times, candidate.times
    ratios = log_ratios(base_times, times)
    reached_by_baseline = {each.seed for each in base_times if each.reached}
    reached = [each.reached for each in times if each.seed in reached_by_baseline]
    conclusion = judge_log_ratios(ratios, alpha=for_seeds, same=math.log(rule.same), shared_error=error)
    words: dict[str, TimeVerdict] = {"above": "faster", "below": "slower", "same": "same"}
    verdict = words.get(conclusion, "open")
    if not any(reached) and len(reached) >= ENOUGH_MISSES:
        verdict = "missed"
    elif verdict == "same" and not all(reached):  # for a missed target, only a lower bound of the time is known
        verdict = "open"
    ours = {each.seed: each.accuracy for each in candidate.trajectories}
    pairs = [(each.accuracy, ours[each.seed]) for each in baseline.trajectories if each.seed in ours]
    quality = baseline.quality
    both = [(theirs, own) for theirs, own in pairs if theirs is not None and own is not None]
    differences = [quality.scaled(own) - quality.scaled(theirs) for theirs, own in both]
    # The loss of quality lies between `least` and `most`.
    least, most = sorted(quality.cost(quality.change(bound)) for bound in interval(differences, alpha))
    accuracy_verdict: AccuracyVerdict = "open"
    if least > margin or (None in ours.values() and all(theirs is not None for theirs, _ in pairs)):
        accuracy_verdict = quality.beyond  # the loss is too large, or only this method diverged
    elif most < margin:
        accuracy_verdict = "within"
    return MethodDecision(
        method=candidate.method,
        num_seeds=len(times),
        num_missed=sum(not each.reached for each in times),
        factor=_effect(ratios, for_seeds, error).on_scale(math.exp) if any(reached) else None,
        verdict=verdict,
        accuracy=_effect(differences, alpha).on_scale(quality.change) if differences else None,
        accuracy_verdict=accuracy_verdict,
    )


def _effect(values: Sequence[float], alpha: float, error: float = 0.0) -> Effect:
    # Return the mean and, if there are enough values, its interval, widened by ``error`` on both sides.
    low, high = interval(values, alpha)
    bounds = (low - error, high + error) if math.isfinite(high + error) else (None, None)
    return Effect(value=statistics.fmean(values), low=bounds[0], high=bounds[1], p=None)


def best_of(decisions: Sequence[MethodDecision]) -> MethodDecision:
    """Return the decision about the best method; verdicts on time rank first, then those on quality, then factors."""
    times = ("faster", "open", "same", "slower", "missed")
    accuracies = {"within": 0, "open": 1, "below": 2, "above": 2}
    return min(
        decisions,
        key=lambda each: (
            times.index(each.verdict), accuracies[each.accuracy_verdict], -(each.factor.value if each.factor else 0.0)
        ),
    )  # fmt: skip


def seeds_in_words(number: int) -> str:
    """Return "1 seed" or "5 seeds"."""
    return f"{number} {'seed' if number == 1 else 'seeds'}"
