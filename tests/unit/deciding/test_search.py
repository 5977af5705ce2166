"""The search for an answer, with faked trainings and step times: seeds that it trains, when it stops, its checks."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bench.core.config.run import RunConfig
from bench.core.errors import NothingToCompare
from bench.deciding import search
from bench.deciding.answer import Answer, LinkCheck
from bench.deciding.decision import Evidence
from bench.deciding.load import SET_ASIDE
from bench.deciding.search import TRAJECTORIES, WHOLE_RUNS, Search
from bench.deciding.step_times import LinkStepTimes
from bench.deciding.study import Method, Study
from bench.deciding.trajectory import Trajectory, trajectory_of
from tests.unit.deciding.test_decision import run_of, trajectory

NAMES = ("bf16", "topk", "powersgd")
# Steps to the target by method and seed. topk is decided after 5 seeds, powersgd never.
STEPS: dict[str, list[int]] = {
    "bf16": [100, 104, 98, 102, 100, 99, 101, 103],
    "topk": [50, 51, 50, 49, 52, 50, 51, 50],
    "powersgd": [60, 180, 70, 160, 65, 170, 75, 150],
}


@dataclasses.dataclass
class Fakes:
    """Replaces what needs processes; `trained` holds (folder, method, seed) of each training, in order.

    `share` is what other programs take of the cores during each measurement, and `share_now` between them.
    """

    missed: tuple[str, ...] = ()
    link_s: float = 1.0
    share: float = 0.0
    share_now: float = 0.0
    num_jobs: int = 0
    trained: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)

    def train(self, configs: list[RunConfig], out: Path, *_: object) -> bool:
        out.mkdir(exist_ok=True)
        new = [config for config in configs if not (out / config.digest).exists()]
        for config in new:
            (out / config.digest).touch()
            self.trained.append((out.name, config.compressor, config.seed))
        return bool(new)

    def find(self, configs: list[RunConfig], out: Path, _: float) -> dict[str, Trajectory]:
        return {config.digest: self._trajectory(config, out.name) for config in configs}

    def _trajectory(self, config: RunConfig, folder: str) -> Trajectory:
        steps = STEPS[config.compressor][config.seed - 1]
        found = trajectory(steps, config.seed, reached=config.compressor not in self.missed)
        found.run.rows[0]["other_cpu_share"] = self.share
        return dataclasses.replace(found, train_time_s=0.01 * steps * (self.link_s if folder == WHOLE_RUNS else 1.0))

    def times(self, configs: Mapping[str, RunConfig], *_: object, **__: object) -> dict[str, LinkStepTimes]:
        self.num_jobs += 1
        times = LinkStepTimes(nbytes=[100.0], seconds=[[[0.01], [0.01]]], other_cpu_share=[self.share])
        return dict.fromkeys(configs, times)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    found = Fakes()
    monkeypatch.setattr(search, "train_missing", found.train)
    monkeypatch.setattr(search, "find_trajectories", found.find)
    monkeypatch.setattr(search, "measure_step_times", found.times)
    monkeypatch.setattr(search, "share_now", lambda: found.share_now)
    monkeypatch.setattr(Search, "_warnings", lambda *_: [])
    return found


def run_search(
    folder: Path, seeds: int = 8, ends_at: float = math.inf, names: tuple[str, ...] = NAMES, **changes: Any
) -> Answer:
    methods = [
        Method(
            name=name,
            trajectory=RunConfig(compressor=name, target_accuracy=0.9),
            on_link=RunConfig(compressor=name, target_accuracy=0.9, stop_at_target=True, hosts=2),
        )
        for name in names
    ]
    study = Study(base={}, methods=[{"compressor": name} for name in names], rule={})
    values: dict[str, Any] = {
        "study": study,
        "methods": methods,
        "folder": folder,
        "server": mock.Mock(),
        "live": mock.Mock(),
        "ends_at": ends_at,
        "checks": False,
    }
    return Search(**values | changes).run(range(1, seeds + 1))


def seeds_of(fakes: Fakes, method: str, folder: str = TRAJECTORIES) -> list[int]:
    return [seed for where, name, seed in fakes.trained if (where, name) == (folder, method)]


def test_decided_methods_get_no_more_seeds(fakes: Fakes, tmp_path: Path) -> None:
    result = run_search(tmp_path)
    assert {each.method: each.verdict for each in result.decisions} == {"topk": "faster", "powersgd": "open"}
    assert result.stopped == "after 8 seeds (--max-seeds)"
    decided_after = next(each.num_seeds for each in result.decisions if each.method == "topk")
    assert 4 <= decided_after < 8
    assert seeds_of(fakes, "topk") == list(range(1, decided_after + 1))
    assert seeds_of(fakes, "powersgd") == seeds_of(fakes, "bf16") == list(range(1, 9))
    orders = {tuple(name for _, name, seed in fakes.trained if seed == each) for each in range(1, 5)}
    assert len(orders) > 1  # the methods of a seed are trained in random order


def test_the_same_question_again_trains_nothing_and_answers_the_same(fakes: Fakes, tmp_path: Path) -> None:
    first = run_search(tmp_path)
    trained = list(fakes.trained)
    again = run_search(tmp_path)
    assert (again.decisions, fakes.trained) == (first.decisions, trained)


@pytest.mark.parametrize(
    ("share", "over", "stopped"),
    [
        (0.0, 1.1, "when the time was over (--budget)"),
        (0.5, 0.6, "when half of the time was over (--budget), because the machine is busy"),
        (0.0, 0.6, "after 8 seeds (--max-seeds)"),
    ],
)
def test_the_budget_ends_the_search_and_half_of_it_on_a_busy_machine(
    share: float, over: float, stopped: str, fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.share = fakes.share_now = share
    monkeypatch.setattr(search.time, "monotonic", lambda: over * 600.0 if fakes.num_jobs else 0.0)
    result = run_search(tmp_path, ends_at=600.0)
    num_seeds = 8 if "max-seeds" in stopped else 1
    assert (result.stopped, seeds_of(fakes, "bf16")) == (stopped, list(range(1, num_seeds + 1)))
    assert result.needs_idle_machine is (share > 0.0)


def test_a_baseline_that_never_reaches_the_target_ends_the_search(fakes: Fakes, tmp_path: Path) -> None:
    fakes.missed = ("bf16",)
    with pytest.raises(NothingToCompare, match=r"bf16 reached 90 % with none of 3 seeds so far"):
        run_search(tmp_path)


@pytest.mark.parametrize(("link_s", "is_whole"), [(1.05, False), (1.2, True)])
def test_whole_runs_count_if_composed_times_deviate(
    link_s: float, is_whole: bool, fakes: Fakes, tmp_path: Path
) -> None:
    fakes.link_s = link_s
    result = run_search(tmp_path, checks=True)
    assert [check.method for check in result.checks] == ["bf16", "topk"]
    assert all(check.deviation == pytest.approx(1.0 / link_s - 1.0) for check in result.checks)
    assert {time.origin for time in result.evidence[0].times} == {"measured" if is_whole else "composed"}
    assert seeds_of(fakes, "bf16", WHOLE_RUNS) == (list(range(1, 9)) if is_whole else [1])


@pytest.mark.parametrize(
    ("composed_s", "is_same", "is_passed"),
    [(10.9, True, True), (11.2, True, False), (8.9, True, False), (10.0, False, False)],
)
def test_a_check_fails_beyond_ten_percent_or_if_the_trainings_differ(
    composed_s: float, is_same: bool, is_passed: bool
) -> None:
    check = LinkCheck(method="m", seed=1, composed_s=composed_s, measured_s=10.0, is_same_training=is_same)
    assert check.is_passed is is_passed


def test_a_check_that_fails_on_a_busy_machine_leaves_the_verdict_to_an_idle_one(fakes: Fakes, tmp_path: Path) -> None:
    fakes.link_s, fakes.share, fakes.share_now = 1.4, 0.5, 0.6
    live = mock.Mock()
    busy = run_search(tmp_path, seeds=5, checks=True, live=live)
    assert any("other programs take 60% of the cores now" in str(call) for call in live.say.call_args_list)
    assert [each.verdict for each in busy.decisions] == ["open", "open"]
    assert [check.is_disturbed for check in busy.checks] == [True, True]
    assert dataclasses.asdict(busy.load) == {"at_start": 0.6, "trajectories": 0.5, "step_times": 0.5, "checks": 0.5}
    assert busy.sentences[1] == "Open because the check failed on a busy machine: topk, powersgd."
    assert busy.sentences[2].endswith("(-28.6%), while other programs took up to 50% of the cores.")
    assert busy.sentences[3].startswith(
        f"To decide, run the same command with --out {tmp_path} when the machine is idle"
    )
    trained, num_jobs = list(fakes.trained), fakes.num_jobs
    assert {seed for folder, _, seed in trained if folder == WHOLE_RUNS} == {1}  # those of the check
    again = run_search(tmp_path, seeds=5, checks=True)
    assert (again.decisions, fakes.trained, fakes.num_jobs) == (busy.decisions, trained, num_jobs)
    fakes.link_s, fakes.share, fakes.share_now = 1.0, 0.0, 0.0
    idle = run_search(tmp_path, seeds=5, checks=True)
    assert {each.method: each.verdict for each in idle.decisions} == {"topk": "faster", "powersgd": "open"}
    assert fakes.trained[len(trained) :] == [(WHOLE_RUNS, "bf16", 1), (WHOLE_RUNS, "topk", 1)]
    assert fakes.num_jobs == 2 * num_jobs
    assert len(list((tmp_path / SET_ASIDE / "1" / WHOLE_RUNS).iterdir())) == 2  # nothing that was measured is lost


@pytest.mark.parametrize(("share", "num_seeds"), [(0.5, 4), (0.05, 8)])
def test_no_seeds_are_added_for_step_times_that_only_an_idle_machine_can_improve(
    share: float, num_seeds: int, fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.01, 0.05] * 50)

    def differing(configs: Mapping[str, RunConfig], *_: object, **__: object) -> dict[str, LinkStepTimes]:
        each = {name: 0.01 if name == "bf16" else next(seconds) for name in configs}
        return {
            name: LinkStepTimes(nbytes=[100.0], seconds=[[[step_s]]], other_cpu_share=[share])
            for name, step_s in each.items()
        }

    monkeypatch.setattr(search, "measure_step_times", differing)
    fakes.share_now = share
    result = run_search(tmp_path, names=("bf16", "topk"))
    assert seeds_of(fakes, "topk") == list(range(1, num_seeds + 1))
    assert (result.decisions[0].verdict, result.needs_idle_machine) == ("open", num_seeds == 4)


@pytest.mark.parametrize("link_s", [1.0, 1.4])
def test_times_are_measured_again_when_the_load_has_passed(
    link_s: float, fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.link_s, fakes.share = link_s, 0.5

    def passed() -> float:
        fakes.link_s, fakes.share = 1.0, 0.0
        return 0.0

    looks = iter([lambda: 0.6, passed])
    monkeypatch.setattr(search, "share_now", lambda: next(looks)())
    result = run_search(tmp_path, seeds=5, checks=True)
    assert (result.load.step_times, result.load.checks) == (0.0, 0.0)
    assert result.decisions[0].verdict == "faster"
    assert seeds_of(fakes, "bf16") == [1, 2, 3, 4, 5]
    assert seeds_of(fakes, "bf16", WHOLE_RUNS) == [1, 1]


def test_whole_runs_that_count_are_not_set_aside(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are timed under load, but the check is not, so the link itself makes the composed times wrong."""
    fakes.link_s = 1.4

    def busy_jobs(configs: Mapping[str, RunConfig], *_: object, **__: object) -> dict[str, LinkStepTimes]:
        fakes.num_jobs += 1
        share = 0.5 if len(configs) == len(NAMES) else 0.0
        times = LinkStepTimes(nbytes=[100.0], seconds=[[[0.01], [0.01]]], other_cpu_share=[share])
        return dict.fromkeys(configs, times)

    monkeypatch.setattr(search, "measure_step_times", busy_jobs)
    for _ in range(2):
        result = run_search(tmp_path, seeds=5, checks=True)
        assert {time.origin for time in result.evidence[0].times} == {"measured"}
        assert seeds_of(fakes, "bf16", WHOLE_RUNS) == [1, 2, 3, 4, 5]


def test_eight_jobs_time_steps_during_the_first_four_seeds(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_before: list[int] = []

    def drifting(configs: Mapping[str, RunConfig], *_: object, **__: object) -> dict[str, LinkStepTimes]:
        trained_before.append(len(fakes.trained))
        return {name: LinkStepTimes(nbytes=[100.0], seconds=[[[0.01 * len(trained_before)]]]) for name in configs}

    monkeypatch.setattr(search, "measure_step_times", drifting)
    result = run_search(tmp_path)
    jobs = LinkStepTimes(nbytes=[100.0], seconds=[[[0.01 * number]] for number in range(1, 9)])
    assert {each.method: each.step_times for each in result.evidence} == dict.fromkeys(NAMES, jobs)
    assert trained_before == [3, 3, 4, 6, 7, 9, 10, 12]  # of three methods, one is trained before the job half way
    again = run_search(tmp_path)
    assert (again.decisions, again.evidence[0].step_times, len(trained_before)) == (result.decisions, jobs, 8)


def test_no_method_is_decided_before_the_last_job(fakes: Fakes, tmp_path: Path) -> None:
    study = Study(base={}, methods=[{"compressor": name} for name in NAMES], rule={"alpha": 0.5})  # two seeds would do
    result = run_search(tmp_path, study=study)
    assert next(each.num_seeds for each in result.decisions if each.method == "topk") == 4


def search_of(study: Study, methods: list[Method], folder: Path) -> Search:
    """Return a search with target 0.9 that starts nothing."""
    made = Search(
        study=study,
        methods=methods,
        folder=folder,
        server=mock.Mock(),
        live=mock.Mock(),
        ends_at=math.inf,
        checks=False,
    )
    made._target, made._jobs = 0.9, []
    return made


def test_warnings_name_methods_as_the_table_does(tmp_path: Path) -> None:
    names = {"bf16": RunConfig(compressor="bf16"), "local": RunConfig(strategy="local:steps=5")}
    frozen = {name: run_of([0.1, 0.1], config_id=config.config_id, train_loss=2.3) for name, config in names.items()}
    methods = [Method(name=name, trajectory=config, on_link=config) for name, config in names.items()]
    asked = search_of(Study(base={}, methods=[{}, {}], rule={}), methods, tmp_path)
    found = asked._warnings(
        [Evidence(method=name, trajectories=[trajectory_of(run, 0.9)]) for name, run in frozen.items()]
    )
    assert [warning.partition(":")[0] for warning in found] == ["bf16", "local"]


@pytest.mark.parametrize("strategy", ["ddp", "local:steps=auto"])
def test_warnings_are_about_the_runs_that_count(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baselines: list[str] = []
    monkeypatch.setattr(search, "compare", lambda _, baseline, **__: baselines.append(baseline) or mock.Mock())
    monkeypatch.setattr(search, "implausible", lambda _: [])
    apart, on_link = RunConfig(target_accuracy=0.9), RunConfig(target_accuracy=0.9, hosts=2, bandwidth="1mbit")
    methods = [Method(name="none", trajectory=apart, on_link=on_link)]
    asked = search_of(Study(base={"strategy": strategy}, methods=[{}], rule={}), methods, tmp_path)
    assert asked._warnings([]) == []
    assert apart.config_id != on_link.config_id
    assert baselines == [(apart if strategy == "ddp" else on_link).config_id]


def test_a_baseline_that_misses_the_bits_ends_the_search(
    fakes: Fakes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fakes.missed = ("bf16",)
    ended = iter([2.31, 2.3, 2.35])
    whole = Fakes._trajectory

    def found(self: Fakes, config: RunConfig, folder: str) -> Any:
        return dataclasses.replace(
            whole(self, config, folder), accuracy=next(ended) if config.compressor == "bf16" else 2.0
        )

    monkeypatch.setattr(Fakes, "_trajectory", found)
    configs = [RunConfig(compressor=name, target_bits_per_byte=2.1) for name in ("bf16", "topk")]
    with pytest.raises(NothingToCompare) as caught:
        run_search(
            tmp_path,
            study=Study(base={"target_bits_per_byte": 2.1}, methods=[{}, {}], rule={}),
            methods=[Method(name=each.compressor, trajectory=each, on_link=each) for each in configs],
        )
    assert str(caught.value) == (
        "bf16 reached 2.1 bits per byte with none of 3 seeds so far, and ended with 2.3 bits per byte at best; raise "
        "--target-bits-per-byte, or give more --epochs"
    )
