"""Plan the runs of one `bench run`, one per seed and compressor, and execute them in turn, or resume one run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from bench.api.progress import Display, print_notes
from bench.core.config.run import RunConfig
from bench.core.config.syntax import parse_seeds
from bench.core.counters import NOTEWORTHY_SHARE
from bench.core.errors import FAIL_AGAIN, Interrupted, RunFailed, UsageError
from bench.core.rows import read_rows
from bench.core.run_folder import RUNS_FOLDER, RunFolder
from bench.core.spec import split_list, usage_errors
from bench.hosts.cluster import Cluster
from bench.hosts.support import check_and_choose_backend
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.plan import plan_each, prepare_data, with_ranks
from bench.launch.recipes import with_recipe
from bench.launch.run import Result, check_left, configuration_of, execute, last_step, resume
from bench.launch.sweep_file import SweepFile, plan_runs
from bench.report.quality import quality_of
from collectives.refusals import Refusal, refuse

Residuals = Literal["sum", "drop"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSet:
    """The runs of one `bench run`.

    Attributes:
        configs: complete configurations of all planned runs, in order.
        results: results of the runs that were executed: all planned runs or, if a failed or stopped run ended
            the series, the runs up to that one.
    """

    configs: list[RunConfig]
    results: list[Result]

    @property
    def num_methods(self) -> int:
        """The number of different configurations, not counting different seeds."""
        return len({config.config_id for config in self.configs})

    def raise_failures(self) -> None:
        """Raise the error of the last run that did not end well, if there is one.

        Raises:
            Interrupted: the user stopped the run.
            RunFailed: the run failed.
        """
        failed = [result for result in self.results if result.status != "ok"]
        if not failed:
            return
        last, left = failed[-1], self.configs[len(self.results) :]
        step, path = last_step(last.folder), last.folder.path
        advice = ""
        if step is not None and last.summary.get("error_kind") not in FAIL_AGAIN:  # a resumed run keeps its options
            advice = f"; to resume from step {step}: bench run --resume {path}"
        counted = ""
        if self.num_methods > 1:
            counted = f"{len(failed)} of {len(self.configs)} runs failed, the last one with: "
            advice += f"; {len(left)} of {len(self.configs)} runs were not started" if left else ""
        elif left:
            advice += f"; not run: --seeds {','.join(str(config.seed) for config in left)}"
        if last.status == "interrupted":
            raise Interrupted(f"{last.error} in {path}{advice}")
        raise RunFailed(f"{counted}{last.error}; rows and logs so far are in {path}{advice}")


def train(
    options: RunConfig,
    given: Collection[str],
    *,
    seeds: str | None = None,
    out: Path = RUNS_FOLDER,
    resumed: Path | None = None,
    residuals: Residuals | None = None,
    quiet: bool = False,
    show: Callable[[list[RunConfig], ForkServer], None] | None = None,
) -> RunSet:
    """Execute the runs of one `bench run`, or resume a run.

    Args:
        options: the options of `bench run`.
        given: names of the options that the user gave.
        seeds: seeds such as ``1-5``, with one run per seed; None: the seed in `options`.
        out: folder in which the runs' folders are made.
        resumed: folder of the run to resume; None: start new runs.
        residuals: what happens to the old ranks' residuals if the run resumes with another number of ranks.
        quiet: show no progress and no notes.
        show: called with the planned runs and the server instead of executing the runs.

    Raises:
        UsageError: an option is not possible.
    """
    beside = {"seeds": seeds is not None, "out": out != RUNS_FOLDER, "dry_run": show is not None}
    with usage_errors():
        refuse(_refusals, given, beside, residuals, is_resumed=resumed is not None)
    if resumed is not None:
        timeout_s = options.timeout_s if "timeout_s" in given else None
        return _resume(resumed, options.world_size, residuals, timeout_s, quiet=quiet)
    options = options.changed(**with_recipe({name: getattr(options, name) for name in given}))
    with ForkServer(TRAIN) as server:  # needed even for a dry run: it refuses missing kernels
        configs = plan_all(options, [options.seed] if seeds is None else parse_seeds(seeds), server)
        if show is not None:
            show(configs, server)
            return RunSet(configs=configs, results=[])
        make_each_ready(configs, server, quiet=quiet)
        return execute_all(configs, out, server, quiet=quiet)


def repeat(path: Path) -> RunSet:
    """Execute the run in a folder again, with the same configuration, in a new folder beside it.

    Raises:
        UsageError: the folder's configuration is of another version, or not possible on this machine.
    """
    config = RunConfig.from_json(RunFolder(path).config)
    with ForkServer(TRAIN) as server:
        make_each_ready([config], server)
        return execute_all([config], path.resolve().parent, server)


def _refusals(
    given: Collection[str], beside: dict[str, bool], residuals: str | None, *, is_resumed: bool
) -> list[Refusal]:
    """Return the refusals of options that contradict --resume, and of --seed together with --seeds.

    A resumed run takes most options from its own configuration.

    Args:
        given: names of the options of a configuration that the user gave.
        beside: for each of the other options, by keyword, True if the user gave it.
        residuals: value of --resume-residuals.
        is_resumed: True if a run is resumed.
    """
    others = [each.keyword for each in RunConfig.options() if each.name in {*given} - {"world_size", "timeout_s"}]
    others += [name for name, is_given in beside.items() if is_given]
    return [
        Refusal(
            residuals not in (None, *get_args(Residuals)),
            f"--resume-residuals {residuals} is not possible",
            [{"resume_residuals": each} for each in get_args(Residuals)],
        ),
        Refusal(
            is_resumed and bool(others),
            "--resume takes all other options from the run's own configuration",
            [dict.fromkeys(others)],
        ),
        Refusal(
            not is_resumed and residuals is not None,
            "--resume-residuals is for a run that resumes with another number of ranks (--resume and --world-size)",
            [{"resume_residuals": None}],
        ),
        Refusal(
            beside["seeds"] and "seed" in given,
            "--seed and --seeds contradict each other",
            [{"seed": None}, {"seeds": None}],
        ),
    ]


def plan_all(options: RunConfig, seeds: list[int], server: ForkServer) -> list[RunConfig]:
    """Return the configurations of all runs to execute.

    The runs are in the order of the seeds. If there are several compressors, their order within a seed is random, as in
    a sweep.

    Raises:
        UsageError: the options are not possible, or name one compressor twice.
    """
    specs = split_list(options.compressor)
    if len(specs) == 1:
        (outcome,) = plan_each([options], server)
        if isinstance(outcome, UsageError):
            raise outcome
        return [outcome.changed(seed=seed) for seed in seeds]
    if options.nnodes > 1:
        raise UsageError(
            f"--compressor names {len(specs)} compressors, which can only be compared on one machine; with --nnodes "
            f"{options.nnodes}, give one compressor"
        )
    base = options.flag_values()
    methods = SweepFile(where="--compressor", base=base, seeds=seeds, matrix={"compressor": specs})
    configs = [run.config for run in plan_runs(methods, server)]
    if len(configs) < len(specs) * len(seeds):
        raise UsageError(f"--compressor {options.compressor} names one compressor twice; name each compressor once")
    return configs


def make_each_ready(configs: Sequence[RunConfig], server: ForkServer, *, quiet: bool = False) -> None:
    """Prepare all runs before the first one starts, and print the notes of their configurations unless `quiet`.

    This checks that the machine supports the virtual hosts, and downloads missing data sets.

    Raises:
        UsageError: this machine does not support the virtual hosts of a configuration.
    """
    for config in {config.config_id: config for config in configs}.values():
        if config.cluster is not None:
            check_and_choose_backend(Cluster.from_dict(config.cluster))
    for dataset, data_dir in dict.fromkeys((config.dataset, config.data_dir) for config in configs):
        server.call(prepare_data, dataset, data_dir)
    if not quiet:
        print_notes(configs)


def execute_all(configs: list[RunConfig], out: Path, server: ForkServer, *, quiet: bool = False) -> RunSet:
    """Execute the runs in turn, and show their progress unless `quiet`.

    With one compressor, stop at the first failure; with several, go on with the next run.

    Args:
        configs: the runs, which `make_each_ready` has prepared.
        out: folder in which the runs' folders are made.
        server: starts the ranks.
        quiet: show no progress.

    Raises:
        UsageError: `out` cannot be written, or this machine does not support the virtual hosts.
    """
    runs = RunSet(configs=configs, results=[])
    are_several = runs.num_methods > 1
    for number, config in enumerate(configs, 1):
        position = f"{number}/{len(configs)} " if len(configs) > 1 else ""
        title = f"{position}{config.compressor if are_several else config.name} seed {config.seed}"
        with Display(title, quiet=quiet) as display:
            result = execute(config, out, display.report, server)
        runs.results.append(result)
        if result.status == "interrupted" or (result.status != "ok" and not are_several):
            break
    return runs


def _resume(
    path: Path, world_size: int | None, residuals: Residuals | None, timeout_s: float | None, *, quiet: bool
) -> RunSet:
    """Resume a run from its last checkpoint; `world_size` or `timeout_s` None keeps the run's own."""
    folder = RunFolder(path.resolve())  # the folder's name identifies the run, so resolve `.` and links
    check_left(folder)
    config = configuration_of(folder)
    if world_size in (None, config.world_size):
        if residuals is not None:
            raise UsageError(
                f"--resume-residuals is for a run that resumes with another number of ranks than before, which was "
                f"{config.world_size}; give another --world-size, or leave out --resume-residuals"
            )
    elif residuals is None:
        raise UsageError(
            f"{folder.path} had {config.world_size} ranks, each with residuals that it had not sent; choose one: "
            "--resume-residuals sum (adds them up and distributes them to the new ranks), --resume-residuals drop "
            "(discards them), or no --world-size (keeps the number of ranks)"
        )
    with ForkServer(TRAIN) as server:
        if residuals is not None and world_size is not None:
            server.warm_up(config.threads)
            config = server.call(with_ranks, config, world_size)
        if timeout_s is not None:
            config = config.changed(timeout_s=timeout_s)
        with Display(f"{config.name} seed {config.seed}, resumed", quiet=quiet) as display:
            result = resume(folder, display.report, server, config, residuals)
    return RunSet(configs=[config], results=[result])


def rows_of(result: Result) -> list[dict[str, Any]]:
    """Return the rows that a run has written so far."""
    return read_rows(result.folder.metrics) if result.folder.metrics.exists() else []


def warn_of_runs(results: Sequence[Result]) -> None:
    """Print warnings on stderr about successful runs whose results should not be trusted.

    For example, the ranks of a run ended with different parameters, or other programs made its times too long.
    """
    from bench.report import comparison, store, verdict  # takes 20 ms, so only if it is needed

    files = [result.folder.metrics for result in results if result.status == "ok"]
    if not (files := [file for file in files if file.exists()]):
        return
    rows = store.read(files)
    for sentence in verdict.of_runs(comparison.compare(rows, metric=quality_of(rows).column)):
        print(f"warning: {sentence}", file=sys.stderr)
    if (share := max((row["other_cpu_share"] or 0.0 for row in rows), default=0.0)) > NOTEWORTHY_SHARE:
        print(
            f"warning: other programs used up to {share:.0%} of this machine's cores during training, which makes the "
            "times too long; run it again on an idle machine",
            file=sys.stderr,
        )
