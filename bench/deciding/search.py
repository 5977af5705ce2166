"""Search for the answer: train seed by seed, time the steps on the link, and stop when every method is decided."""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.api.progress import LiveLine
from bench.core.config.configuration import short_digest
from bench.core.config.run import RunConfig
from bench.core.errors import NothingToCompare
from bench.core.run_folder import read_json, write_json
from bench.core.units import format_seconds, parse_rate
from bench.deciding.answer import Answer, LinkCheck, failed_under_load, judge
from bench.deciding.decision import Evidence, MethodDecision, best_of, decide, log_ratios, seeds_in_words
from bench.deciding.load import Load, busy, is_busy, mean_share, set_aside, share_now
from bench.deciding.progress import state, time_left
from bench.deciding.rates import crossing, rates_to_try
from bench.deciding.step_times import LinkStepTimes, joined, levels_of, measure_step_times
from bench.deciding.study import LINK_OPTIONS, DecideConfig, Method, Study, train_missing
from bench.deciding.trajectory import Trajectory, find_trajectories, without_load
from bench.launch.jobs.fork_server import ForkServer
from bench.report.comparison import compare
from bench.report.verdict import implausible

# Folders of runs; `bench compare` leaves out folders whose names begin with a dot, unless the user names them.
TRAJECTORIES, WHOLE_RUNS = ".trajectories", ".whole-runs"
STEP_TIMES = "step-times"
# The search ends after this number of seeds if the baseline has missed the target with all of them.
ENOUGH_MISSES = 3
# The jobs that time steps are spread over the first four seeds, because the speed of a machine drifts. No method is
# decided before the last job, because the error bound of the step times holds only for a fixed number of jobs.
NUM_JOBS, JOBS_PER_SEED = 8, 2
FEWEST_SEEDS = NUM_JOBS // JOBS_PER_SEED
LONGEST_TIMING_S = 2.0
# Reasons to stop that further seeds would not remove, but an idle machine would.
CHECK_DISTURBED = "because the check failed on a busy machine"
TIMES_DISTURBED = "because the step times of a busy machine differ too much"
HALF_OVER = "when half of the time was over (--budget), because the machine is busy"


@dataclasses.dataclass(kw_only=True)
class Search:
    """Trains and measures until every method is decided, the seeds are used up, or the time is over.

    Attributes:
        study: the study.
        methods: the study's methods with their configurations, the baseline first.
        folder: folder of the study.
        server: starts the ranks of runs.
        live: shows the progress.
        ends_at: time of `time.monotonic` after which no seed is added.
        checks: True to train the baseline and the best method once on the link, to check the composed times.
    """

    study: Study
    methods: list[Method]
    folder: Path
    server: ForkServer
    live: LiveLine
    ends_at: float
    checks: bool

    def run(self, seeds: Sequence[int]) -> Answer:
        """Search for the answer and return it; the folder keeps all measurements, and the next call uses them again.

        Args:
            seeds: the seeds to use, in order.

        Raises:
            Interrupted: the user stopped the command.
            NothingToCompare: the baseline never reached the target.
            RunFailed: a run failed for another reason than divergence, or steps could not be timed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.study.store(self.folder)
        self._rule = DecideConfig(**self.study.rule)
        self._target: float = getattr(self.methods[0].trajectory, self.study.quality.target_column)
        self._whole = self.study.is_time_dependent
        self._jobs: list[dict[str, LinkStepTimes]] = []
        self._times: dict[str, LinkStepTimes] = {}
        self._known: dict[str, Trajectory] = {}  # trainings that were read, by the digest of their configuration
        self._seed_s = self._job_s = 0.0
        self._began = time.monotonic()
        self._seeds_of: dict[str, list[int]] = {}
        left = format_seconds(self.ends_at - time.monotonic())
        self.live.say(f"{', '.join(m.name for m in self.methods)}: at most {seeds_in_words(len(seeds))}, or {left}")
        if is_busy(at_start := share_now()):
            self.live.say(
                f"other programs take {at_start:.0%} of the cores now, so this takes longer; trainings count anyway, "
                "but the same command may have to measure times again on an idle machine"
            )
        stopped, checks = self._measure(seeds)
        if self._worth_repeating(checks) and not is_busy(share_now()):
            self.live.say("the machine is idle again: the step times and the check are measured again")
            self._forget_times()
            stopped, checks = self._measure(seeds)
        is_disturbed = failed_under_load(checks)
        if not is_disturbed and not all(check.is_passed for check in checks):
            self._whole = True
            stopped = self._add_seeds(seeds)
        evidence = [self._evidence(method) for method in self.methods]
        decisions = judge(evidence, self._rule, checks)
        if is_disturbed:
            stopped = CHECK_DISTURBED
        is_open = any(each.verdict == "open" for each in decisions)
        needs_idle = is_open and stopped in (CHECK_DISTURBED, TIMES_DISTURBED, HALF_OVER)
        rates_tried, faster_up_to = self._rates(evidence, decisions)
        return Answer(
            folder=self.folder,
            study=self.study,
            target=self._target,
            rule=self._rule,
            evidence=evidence,
            decisions=decisions,
            checks=checks,
            faster_up_to=faster_up_to,
            rates_tried=rates_tried,
            stopped=stopped,
            next_seed_s=(self._seed_s or None) if stopped and not needs_idle else None,
            needs_idle_machine=needs_idle,
            warnings=self._warnings(evidence),
            load=Load(
                at_start=at_start,
                trajectories=mean_share(each.other_cpu_share for found in evidence for each in found.trajectories),
                step_times=mean_share(self._job_shares),
                checks=max((each.other_cpu_share for each in checks if each.other_cpu_share is not None), default=None),
            ),
        )

    def _measure(self, seeds: Sequence[int]) -> tuple[str, list[LinkCheck]]:
        """Train seed by seed, time the steps, and check the composed times.

        Return why the search stopped, as `_add_seeds` does, and the checks.
        """
        stopped = self._add_seeds(seeds)
        return stopped, self._check() if self.checks and not self._whole else []

    def _worth_repeating(self, checks: Sequence[LinkCheck]) -> bool:
        """Return True if the times are worth measuring again on an idle machine; False if whole runs count instead."""
        if all(check.is_passed for check in checks):
            return self._is_timed_under_load
        return failed_under_load(checks)

    @property
    def _job_shares(self) -> list[float | None]:
        """The share of the cores' time that other programs took, in each job that timed steps."""
        return [share for job in self._jobs for share in job[self.methods[0].name].other_cpu_share]

    def _forget_times(self) -> None:
        """Set aside everything that was timed on the link, so that it is measured again."""
        set_aside(self.folder, (STEP_TIMES, WHOLE_RUNS))
        self._jobs, self._times, self._known = [], {}, {}

    def _add_seeds(self, seeds: Sequence[int]) -> str:
        """Train seed by seed; return why the search stopped, or an empty text if every method is decided."""
        # Seeds that are trained already cost no time.
        num_trained = 0 if self._whole else len(self._seeds_of.get(self.methods[0].name, ()))
        self._seeds_of = {method.name: [] for method in self.methods}
        decisions: list[MethodDecision] = []
        stopped = f"after {seeds_in_words(len(seeds))} (--max-seeds)"
        for number, seed in enumerate(seeds, 1):
            methods = self.methods
            if number > FEWEST_SEEDS:
                is_open = {each.method for each in decisions if each.verdict == "open"}
                methods = [self.methods[0], *(each for each in self.methods[1:] if each.name in is_open)]
            self._train_and_time(number, seed, methods)
            if number == ENOUGH_MISSES:
                self._check_target()
            decisions = self._decisions()
            is_answered = number >= min(FEWEST_SEEDS, len(seeds)) and all(each.verdict != "open" for each in decisions)
            most = 0 if is_answered else len(seeds) - number
            self.live.say(f"{state(number, decisions)}{self._time_left(number, most, decisions)}")
            if is_answered:
                stopped = ""
                break
            if number >= FEWEST_SEEDS and self._seeds_are_enough():
                stopped = TIMES_DISTURBED
                break
            if number >= num_trained and time.monotonic() + self._seed_s > self._no_seed_after:
                is_over = self._no_seed_after == self.ends_at
                stopped = "when the time was over (--budget)" if is_over else HALF_OVER
                break
        self._check_target()
        return stopped

    @property
    def _is_timed_under_load(self) -> bool:
        """True if the times come from steps that were timed on a busy machine."""
        return not self._whole and is_busy(mean_share(self._job_shares))

    @property
    def _no_seed_after(self) -> float:
        """Time of `time.monotonic` after which no seed is added; on a busy machine, when half of the budget is over."""
        return (self._began + self.ends_at) / 2 if self._is_timed_under_load else self.ends_at

    def _seeds_are_enough(self) -> bool:
        """Return True if steps were timed on a busy machine, and only the error of their times keeps methods open."""
        if not self._is_timed_under_load:
            return False
        return all(each.verdict != "open" for each in self._decisions(step_times_are_exact=True))

    def _time_left(self, number: int, most: int, decisions: Sequence[MethodDecision]) -> str:
        """Return an estimate of the time until the answer, to end a line with; empty if no seed was trained yet.

        Args:
            number: number of seeds so far.
            most: largest number of further seeds.
            decisions: the decisions so far.
        """
        if not self._seed_s:
            return ""
        rest_s = 0.0 if self._whole else self._job_s * (NUM_JOBS - len(self._jobs))
        if self.checks and not self._whole:
            checked = (self.methods[0].name, best_of(decisions).method)
            once = [self._evidence(each).times[0].seconds for each in self.methods if each.name in checked]
            rest_s += sum(2 * self._job_s + seconds for seconds in once)  # steps are timed before and after the run
        fewest = min(most, max(FEWEST_SEEDS - number, 1))
        left_s = self._no_seed_after - time.monotonic()
        return f"; {time_left(fewest, most, seed_s=self._seed_s, budget_s=left_s, rest_s=rest_s)}"

    def _check_target(self) -> None:
        """Check that the baseline reached the target with at least one of its seeds so far.

        Raises:
            NothingToCompare: the baseline missed the target with all of these seeds.
        """
        baseline = self._evidence(self.methods[0])
        if not any(each.reached for each in baseline.times):
            quality = self.study.quality
            known = [each.accuracy for each in baseline.trajectories if each.accuracy is not None]
            best = quality.in_words(min(known, key=quality.cost)) if known else "no value"
            raise NothingToCompare(
                f"{baseline.method} reached {quality.in_words(self._target)} with none of "
                f"{seeds_in_words(len(baseline.times))} so far, and ended with {best} at best; "
                f"{'lower' if quality.higher_is_better else 'raise'} {quality.target_flag}, or give more --epochs"
            )

    def _train_and_time(self, number: int, seed: int, methods: Sequence[Method]) -> None:
        """Train the methods with one seed, in random order; half way and at the end, also run the jobs that time steps.

        Args:
            number: number of the seed, counted from 1. With the first seed, all jobs run at the end, because the bytes
                that a method sends are only known after it was trained.
            seed: the seed.
            methods: the methods.
        """
        order = random.Random(f"{self.study.digest} {seed}").sample(list(methods), len(methods))
        trained_s = 0.0
        for place, half in enumerate((order[: len(order) // 2], order[len(order) // 2 :]), 1):
            began = time.monotonic()
            if self._train(seed, half):
                trained_s += time.monotonic() - began
            for method in half:
                self._seeds_of[method.name].append(seed)
            if self._whole or number == place == 1:
                continue
            while len(self._jobs) < min(JOBS_PER_SEED * (number - 1) + place, NUM_JOBS):
                self._jobs.append(self._time_steps(self.methods, f"job {len(self._jobs) + 1}"))
                self._times = joined(self._jobs)
        self._seed_s = trained_s or self._seed_s

    def _train(self, seed: int, methods: Sequence[Method]) -> bool:
        """Train the methods with one seed, in this order; return True if any of the runs had not been done before.

        If times come from whole runs, the methods are also trained on the link. If their losses depend on time, they
        are trained only on the link.
        """
        missed = []
        if not self.study.is_time_dependent:
            missed.append(self._train_in(TRAJECTORIES, {m.name: m.trajectory for m in methods}, seed))
        if self._whole:
            missed.append(self._train_in(WHOLE_RUNS, {m.name: m.on_link for m in methods}, seed))
        return any(missed)

    def _train_in(self, folder: str, configs: Mapping[str, RunConfig], seed: int) -> bool:
        names = {config.config_id: name for name, config in configs.items()}
        where = ", on the link" if folder == WHOLE_RUNS else ""

        def show(config: RunConfig, line: dict[str, Any]) -> None:
            if "evaluated" not in line:
                left = format_seconds(max(0.0, self.ends_at - time.monotonic()))
                title = f"seed {seed}, {names[config.config_id]}{where}"
                parts = [title, f"{left} left", f"epoch {line['epoch']:.1f}"]
                self.live.update(parts, total=line["total_steps"], completed=line["step"])

        seeded = [dataclasses.replace(config, seed=seed) for config in configs.values()]
        return train_missing(seeded, self.folder / folder, self.server, show)

    def _evidence(self, method: Method) -> Evidence:
        seeds = self._seeds_of[method.name]

        def found(config: RunConfig, folder: str) -> list[Trajectory]:
            configs = [dataclasses.replace(config, seed=seed) for seed in seeds]
            new = [each for each in configs if each.digest not in self._known]
            self._known |= find_trajectories(new, self.folder / folder, self._target)
            return [self._known[each.digest] for each in configs if each.digest in self._known]

        whole_runs = found(method.on_link, WHOLE_RUNS) if self._whole else []
        return Evidence(
            method=method.name,
            trajectories=(
                whole_runs if self.study.is_time_dependent else without_load(found(method.trajectory, TRAJECTORIES))
            ),
            step_times=None if self._whole else self._times.get(method.name),
            whole_runs=whole_runs,
        )

    def _decisions(self, *, step_times_are_exact: bool = False) -> list[MethodDecision]:
        baseline, *candidates = map(self._evidence, self.methods)
        return [
            decide(baseline, candidate, self._rule, len(candidates), step_times_are_exact=step_times_are_exact)
            for candidate in candidates
        ]

    def _time_steps(self, methods: Sequence[Method], occasion: str) -> dict[str, LinkStepTimes]:
        """Return the step times of the methods on their link from one job; run the job if the folder lacks its results.

        Args:
            methods: the methods.
            occasion: a text that distinguishes this job from other jobs with the same methods on the same link.
        """
        configs = {method.name: method.on_link for method in methods}
        key = short_digest([occasion, *(config.config_id for config in configs.values())])
        path = self.folder / STEP_TIMES / f"{key}.json"
        if (stored := read_json(path)) is not None:
            return {name: LinkStepTimes(**times) for name, times in stored.items()}
        path.parent.mkdir(exist_ok=True)
        began = time.monotonic()
        levels = {
            method.name: levels_of(self._evidence(method).trajectories[0].intervals, is_one=method.exchanges_alike)
            for method in methods
        }
        times = measure_step_times(
            configs,
            levels,
            self.server,
            max_s=LONGEST_TIMING_S,
            on_block=lambda number: self.live.update([f"step times on the link, block {number}"], total=None),
        )
        self._job_s = time.monotonic() - began
        write_json(path, {name: dataclasses.asdict(each) for name, each in times.items()})
        return times

    def _check(self) -> list[LinkCheck]:
        """Train the baseline and the best method once on the link, and compare the measured and the composed times."""
        best = best_of(self._decisions())
        checks = []
        for method in self.methods:
            trajectories = self._evidence(method).trajectories
            reached = [each for each in trajectories if each.num_to_target is not None]
            if reached and (method is self.methods[0] or method.name == best.method):
                check = self._check_of(method, reached[0])
                checks.append(check)
                self.live.say(
                    f"check on the link: {check.method}, seed {check.seed}: composed "
                    f"{format_seconds(check.composed_s)}, measured {format_seconds(check.measured_s)} "
                    f"({check.deviation:+.1%})"
                )
        return checks

    def _check_of(self, method: Method, trajectory: Trajectory) -> LinkCheck:
        """Train a method once on the link, timing steps right before and after; reuse a check in the folder."""
        config = dataclasses.replace(method.on_link, seed=trajectory.seed)
        path = self.folder / STEP_TIMES / f"check-{config.digest}.json"
        if (stored := read_json(path)) is not None:
            return LinkCheck(**stored)
        before = self._time_steps([method], f"before check {config.digest}")
        self._train_in(WHOLE_RUNS, {method.name: method.on_link}, trajectory.seed)
        (whole,) = find_trajectories([config], self.folder / WHOLE_RUNS, self._target).values()
        after = self._time_steps([method], f"after check {config.digest}")
        both = joined([before, after])[method.name]
        shares = [whole.other_cpu_share, *both.other_cpu_share]
        losses = [[row["test_loss"] for row in each.run.rows[: whole.num_to_target]] for each in (whole, trajectory)]
        check = LinkCheck(
            method=method.name,
            seed=trajectory.seed,
            composed_s=trajectory.start_s + both.training_s(trajectory.steps),
            measured_s=whole.train_time_s,
            is_same_training=losses[0] == losses[1],
            other_cpu_share=max((share for share in shares if share is not None), default=None),
            run_id=whole.run["run_id"],
        )
        write_json(path, dataclasses.asdict(check))
        return check

    def _warnings(self, evidence: Sequence[Evidence]) -> list[str]:
        """Return sentences about results that cannot be trusted."""
        rows = [row for each in evidence for trajectory in each.trajectories for row in trajectory.run.rows]
        configs = [each.on_link if self.study.is_time_dependent else each.trajectory for each in self.methods]
        names = {config.config_id: method.name for config, method in zip(configs, self.methods, strict=True)}
        baseline, targets = configs[0].config_id, [f"{self._target:g}"]
        compared = compare(rows, baseline=baseline, metric=self.study.quality.column, targets=targets, rule="anytime")
        shares = [run.other_cpu_share for each in evidence for run in each.whole_runs]
        told = busy(shares, "these runs were timed; decide again with another --out when the machine is idle")
        if not shares:
            told = busy(self._job_shares, "steps were timed; the same command times them again on an idle machine")
        return [*implausible(compared.renamed(names)), *told]

    def _rates(
        self, evidence: Sequence[Evidence], decisions: Sequence[MethodDecision]
    ) -> tuple[list[float], dict[str, float]]:
        """Also time the steps at higher rates of the link, if the link has the same rate in all directions.

        Returns:
            The tried rates in bit/s, and for each method that is faster on this link, the highest rate in bit/s at
            which the method is still faster. Both are empty if no other rate was tried.
        """
        rate = self.study.base.get("bandwidth")
        faster = {each.method for each in decisions if each.verdict == "faster"}
        others = [name for name in LINK_OPTIONS - {"bandwidth", "hosts", "ranks_per_host"} if self.study.base.get(name)]
        if not (rate and faster) or others or self._whole or time.monotonic() > self.ends_at:
            return [], {}
        wanted = [m for m in self.methods if m is self.methods[0] or m.name in faster]
        factors: dict[str, list[float]] = {name: [] for name in faster}
        rates = rates_to_try(parse_rate(rate))
        for number, bps in enumerate(rates):
            times = self._times
            if number:
                study = dataclasses.replace(self.study, base=self.study.base | {"bandwidth": f"{bps:.0f}bit"})
                on_link = {method.name: method.on_link for method in study.plan(self.server)}
                methods = [dataclasses.replace(method, on_link=on_link[method.name]) for method in wanted]
                times = self._time_steps(methods, "another rate")
            baseline, *candidates = (
                dataclasses.replace(each, step_times=times[each.method])
                for each in evidence
                if each.method in (self.methods[0].name, *faster)
            )
            for each in candidates:
                ratios = log_ratios(baseline.times, each.times)
                factors[each.method].append(math.exp(statistics.fmean(ratios)))
        return rates, {name: crossing(rates, each) for name, each in factors.items()}
