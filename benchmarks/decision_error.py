"""Simulate how often `bench decide` errs because step times are measured in a few jobs, and how many seeds it takes.

    python -m benchmarks.decision_error [--decisions 2000] [--out results/reference/decision-error.csv]

Each decision is the whole search of `bench decide`, with up to 20 seeds, in which drawn numbers take the place of
trainings and of jobs that time steps. All blocks of a job share the job's error, which each job draws anew; `job_error`
is its standard deviation in the log ratio of two methods, and blocks differ by further 4 %. `spread` is the standard
deviation of the log ratio over seeds; with 0, all trainings take equally many steps, and nothing changes after the
sixth seed, so the search ends there. A verdict is wrong if it is `faster` or
`slower` for a method that takes as long as the baseline, or anything but `faster` or `open` for one that is 1.06 or 1.5
times faster. `wrong` counts decisions with a wrong verdict on any method, `by_sixth` those in which all methods are
`faster` after at most six seeds.
"""

import argparse
import dataclasses
import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pandas as pd
from typing_extensions import override

from bench.core.config.run import RunConfig
from bench.core.schema import METRICS_BY_NAME
from bench.deciding import search
from bench.deciding.decision import MethodDecision
from bench.deciding.search import Search
from bench.deciding.step_times import LinkStepTimes
from bench.deciding.study import Method, Study
from bench.deciding.trajectory import Trajectory
from bench.report.store import Run

MAX_SEEDS, MAX_SEEDS_ALIKE = 20, 6
STEPS, STEP_S = 1000, 0.01
BLOCKS, BLOCK_DEVIATION = 8, 0.04
JOB_ERRORS = (0.0, 0.02, 0.04, 0.08)
# Number of candidates, factor, spread and job error at which it matters how soon a difference is found.
POWER = [*itertools.product((1, 3), (1.5,), (0.0, 0.05, 0.1), (0.02,))]
BASELINE, NBYTES = "baseline", 100.0
RUN = Run(rows=[dict.fromkeys(METRICS_BY_NAME) | {"status": "ok", "test_accuracy": 0.95}])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnConfig:
    """What a search reads of the configuration of a run; the hundred options of a whole one take long to copy."""

    method: str
    seed: int = 1
    target_accuracy: float = 0.9
    strategy: str = "ddp"

    @property
    def config_id(self) -> str:
        return self.method

    @property
    def digest(self) -> str:
        return f"{self.method}-{self.seed}"


class DrawnSearch(Search):
    """A search that trains nothing, and so has nothing to warn of."""

    @override
    def _warnings(self, evidence: object) -> list[str]:
        return []


@dataclasses.dataclass(kw_only=True)
class Draws:
    """Draws what trainings and jobs would measure.

    Attributes:
        rng: source of all draws.
        factor: how many times faster each candidate is than the baseline.
        spread, job_error: standard deviations of the log ratio over seeds, and over jobs.
    """

    rng: np.random.Generator
    factor: float
    spread: float
    job_error: float

    def find_trajectories(self, configs: Sequence[RunConfig], *_: object) -> dict[str, Trajectory]:
        return {config.digest: self._trajectory(config.seed) for config in configs}

    def _trajectory(self, seed: int) -> Trajectory:
        steps = round(STEPS * math.exp(self.spread / math.sqrt(2) * self.rng.standard_normal()))
        return Trajectory(
            seed=seed,
            intervals=[(0, steps, NBYTES)],
            start_s=0.0,
            num_to_target=1,
            accuracy=0.95,
            train_time_s=1.0,
            run=RUN,
        )

    def measure_step_times(
        self, configs: Mapping[str, RunConfig], *_: object, **__: object
    ) -> dict[str, LinkStepTimes]:
        return {name: LinkStepTimes(nbytes=[NBYTES], seconds=self._job(name)) for name in configs}

    def _job(self, name: str) -> list[list[list[float]]]:
        errors = self.job_error * self.rng.standard_normal() + BLOCK_DEVIATION * self.rng.standard_normal(BLOCKS)
        step_s = STEP_S / (1.0 if name == BASELINE else self.factor)
        return [[[step_s * math.exp(error / math.sqrt(2))] for error in errors]]


def decide_once(draws: Draws, num_candidates: int, folder: Path) -> list[MethodDecision]:
    """Return the decisions of one search with drawn numbers."""
    names = [BASELINE, *(f"method{number}" for number in range(num_candidates))]
    configs = [cast(RunConfig, DrawnConfig(method=name)) for name in names]
    found = DrawnSearch(
        study=Study(base={}, methods=[{"compressor": name} for name in names], rule={}),
        methods=[Method(name=n, trajectory=each, on_link=each) for n, each in zip(names, configs, strict=True)],
        folder=folder,
        server=mock.Mock(),
        live=mock.Mock(),
        ends_at=math.inf,
        checks=False,
    )
    with mock.patch.multiple(
        search,
        train_missing=lambda *_: False,
        find_trajectories=draws.find_trajectories,
        measure_step_times=draws.measure_step_times,
    ):
        max_seeds = MAX_SEEDS if draws.spread else MAX_SEEDS_ALIKE
        return found.run(range(1, max_seeds + 1)).decisions


def simulate(num_candidates: int, factor: float, spread: float, job_error: float, decisions: int) -> dict[str, Any]:
    """Return the shares of decisions with a wrong verdict, and with the right one for all methods after six seeds."""
    wrong_verdicts = {"faster", "slower"} if factor == 1.0 else {"same", "slower"}
    wrong = by_sixth = seeds = 0
    for number in range(decisions):
        draws = Draws(rng=np.random.default_rng(number), factor=factor, spread=spread, job_error=job_error)
        with tempfile.TemporaryDirectory() as folder:
            found = decide_once(draws, num_candidates, Path(folder))
        wrong += any(each.verdict in wrong_verdicts for each in found)
        by_sixth += all(each.verdict == "faster" and each.num_seeds <= 6 for each in found)
        seeds += max(each.num_seeds for each in found)
    return {
        "candidates": num_candidates,
        "factor": factor,
        "spread": spread,
        "job_error": job_error,
        "decisions": decisions,
        "wrong": wrong / decisions,
        "by_sixth": by_sixth / decisions,
        "mean_seeds": round(seeds / decisions, 2),
    }


def main() -> None:
    """Simulate all settings, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="CSV file for the rows")
    options = parser.parse_args()
    rows = []
    settings = [*itertools.product((1, 3), (1.0, 1.06), (0.0, 0.05), JOB_ERRORS), *POWER]
    for setting in settings:
        rows.append(simulate(*setting, options.decisions))
        print(" ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
        if options.out:
            pd.DataFrame(rows).to_csv(options.out, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
