"""The plan of a sweep: every run once and complete, in a shuffled order; all refusals at once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from typing_extensions import override

from bench.cli.sweep import sbatch_line
from bench.core.errors import UsageError
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.sweep_file import PlannedRun, SweepFile, plan_runs
from bench.launch.sweep_state import SweepState, expected_s
from tests.testing.configs import make_config

SWEEP = SweepFile(
    where="grid.toml",
    base={"model": "linear", "train_size": 64, "test_size": 32, "batch_size": 8},
    seeds=[5, 2],
    matrix={"compressor": ["none", "fp16", "topk", "sign"], "world_size": [1, 2]},
)


class Here(ForkServer):
    """A fork server that calls functions in this process."""

    @override
    def warm_up(self, threads: int) -> None:
        pass


def plan(sweep: SweepFile) -> list[PlannedRun]:
    return plan_runs(sweep, Here(TRAIN))


def test_seeds_are_outermost_and_equal_ranks_lie_together() -> None:
    configs = [run.config for run in plan(SWEEP)]
    assert [config.seed for config in configs] == [5] * 8 + [2] * 8
    assert [config.world_size for config in configs] == ([1] * 4 + [2] * 4) * 2
    assert len({config.digest for config in configs}) == 16


def test_configurations_are_shuffled_anew_for_each_seed_and_always_alike() -> None:
    configs = [run.config for run in plan(SWEEP)]
    orders = [tuple(config.compressor for config in configs[start : start + 4]) for start in (0, 4, 8, 12)]
    assert orders[:2] != orders[2:]
    assert [run.config for run in plan(SWEEP)] == configs


def test_runs_are_complete_and_know_their_settings() -> None:
    first = plan(SWEEP)[0]
    assert first.settings == {"compressor": first.config.compressor, "world_size": 1}
    assert first.config.lr is not None
    assert first.config.filled


def test_what_two_configurations_have_in_common_is_run_once() -> None:
    sweep = SweepFile(where="", base=SWEEP.base, include=[{}, {"lr": 0.02}, {"compressor": "none"}])
    assert Counter(run.config.lr for run in plan(sweep)) == {0.02: 1}


def test_every_refusal_is_named_with_what_makes_it_before_anything_starts() -> None:
    sweep = SweepFile(
        where="grid.toml",
        base=SWEEP.base,
        matrix={"compressor": ["none", "topkk"], "batch_size": [8, 0]},
        include=[{"compressor": "topk", "collective": "native"}],
    )
    with pytest.raises(UsageError) as refusal:
        plan(sweep)
    first, *reasons = str(refusal.value).splitlines()
    assert first == "grid.toml has configurations that are not possible, so nothing was started:"
    assert len(reasons) == 3
    assert reasons[0].startswith("  batch_size = 0: --batch-size 0 is not possible: ")
    assert reasons[1].startswith("  compressor = topkk, batch_size = 8: there is no compressor 'topkk' (did you mean")
    assert reasons[2].startswith("  compressor = topk, collective = native: ")


def test_what_the_base_makes_impossible_is_named_so() -> None:
    with pytest.raises(UsageError, match=r"\n  \[base\]: --lr -1"):
        plan(SweepFile(where="", base={"lr": -1}, matrix={"compressor": ["none", "topk"]}))


def test_the_line_for_slurm_has_one_element_per_run_that_is_to_be_done(tmp_path: Path) -> None:
    runs = plan(SWEEP)
    todo = [runs[index].config for index in (0, 1, 2, 5, 15)]
    line = sbatch_line(Path("/x/grid.toml"), SweepState(runs=runs, out=tmp_path, past={}), todo, retry_failed=False)
    cores = max(config.world_size * config.threads for config in todo)
    assert line == (
        f"sbatch --job-name=grid --array=0-2,5,15 --ntasks=1 --cpus-per-task={cores} "
        f"'--wrap=bench sweep /x/grid.toml --out {tmp_path} --only $SLURM_ARRAY_TASK_ID'"
    )
    again = sbatch_line(Path("/x/grid.toml"), SweepState(runs=runs, out=tmp_path, past={}), todo, retry_failed=True)
    assert f"--out {tmp_path} --retry-failed --only" in again


def test_an_estimate_takes_the_same_configuration_else_the_mean_of_all() -> None:
    known, other, unknown = (make_config(lr=lr) for lr in (0.1, 0.2, 0.3))
    assert expected_s({}, [known]) is None
    durations = {known.config_id: [10.0, 20.0], other.config_id: [40.0]}
    assert expected_s(durations, [known, other, unknown]) == pytest.approx(15 + 40 + 70 / 3)
    assert expected_s(durations, []) == 0


def test_of_doubles_the_first_has_all_runs_of_both() -> None:
    tried = [
        {"compressor": compressor, "lr": lr}
        for compressor in ("topk", "topk:ratio=0.01")
        for lr in (0.1, 0.2, 0.3, 0.4, 0.5)
    ]
    runs = plan(dataclasses.replace(SWEEP, seeds=[7], matrix={}, include=tried, base=SWEEP.base | {"world_size": 2}))
    assert sorted((run.settings["compressor"], run.settings["lr"]) for run in runs) == [
        ("topk", lr) for lr in (0.1, 0.2, 0.3, 0.4, 0.5)
    ]
