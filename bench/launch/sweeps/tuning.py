"""Tuning: for each configuration of a file the best of the same settings, by accuracy on held-out training samples.

Underneath it is a sweep, with a seed of its own. No run sees the test set, all try equally many settings, and all train
for equally long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.config.seeds import seeds_text
from bench.core.errors import RunFailed, UsageError
from bench.launch.refusals import without_torch
from bench.launch.sweeps.agenda import SweepState
from bench.launch.sweeps.file import Lists, Options, SweepFile, combinations, table_text
from bench.launch.sweeps.plan import PlannedRun
from bench.launch.sweeps.written import toml_table

if TYPE_CHECKING:
    from bench.datasets.base import Dataset
    from bench.optimizers.base import Optimizer

METHODS = ["none", "topk", "powersgd"]
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""rates to try / the optimizer's own rate, or the one that the user gives"""
HELD_OUT = 0.2
"""samples held out / training samples"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """What tuning chose for one configuration.

    Attributes:
        settings: what the file says of the configuration beside `[base]`.
        best: the settings that were chosen for it.
        accuracy: with these, on the samples that were held out.
        rates_tried: number of settings tried, those that failed included.
        at_the_end: options whose best value is the smallest or largest that was tried.
    """

    settings: Options
    best: Options
    accuracy: float
    rates_tried: int
    at_the_end: list[str]

    @property
    def chosen(self) -> Options:
        """What the configuration is to be run with, beside `[base]`."""
        return {**self.settings, **self.best, "rates_tried": self.rates_tried}


def with_defaults(asked: SweepFile) -> tuple[SweepFile, str]:
    """Choose what the options of `bench tune` leave open: methods, rates, and how many samples are held out.

    Returns:
        the sweep, and the options that say the same; an empty text where nothing was left open

    Raises:
        UsageError: the optimizer or the data set is unknown, or has an option that is.
    """
    base, matrix, tune, said = dict(asked.base), dict(asked.matrix), dict(asked.tune), []
    if "compressor" not in base | matrix:
        matrix["compressor"] = list(METHODS)
        said.append(f"--compressors {','.join(METHODS)}")
    if not tune or not base.get("holdout_size"):
        lr, train_size = without_torch(_lr_and_size, base) or _lr_and_size(base)
        if not tune:
            base.pop("lr", None)
            tune["lr"] = [float(f"{factor * lr:.3g}") for factor in FACTORS]
            said.append(f"--rates {','.join(map(str, tune['lr']))}")
        if not base.get("holdout_size"):
            base["holdout_size"] = max(1, round(HELD_OUT * train_size))
            said.append(f"--holdout-size {base['holdout_size']}")
    return dataclasses.replace(asked, base=base, matrix=matrix, tune=tune), " ".join(said)


def _lr_and_size(base: Options) -> tuple[float, int]:
    """(the peak learning rate, the number of training samples) of a run with these options."""
    optimizer = cast("Optimizer", spec.build("optimizers", base.get("optimizer", RunConfig.optimizer)))
    dataset = cast("Dataset", spec.build("datasets", base.get("dataset", RunConfig.dataset)))
    train_size, _ = dataset.resolve_sizes(base.get("train_size"), None)
    return base.get("lr", optimizer.default_lr), train_size


def tuning_sweep(asked: SweepFile, seed: int) -> SweepFile:
    """The sweep that tries every setting of `[tune]` for every configuration.

    Raises:
        UsageError: nothing is to be tuned, nothing held out, or the budget or seed would not be fair.
    """
    if not asked.tune:
        raise UsageError(f"{asked.where} tunes nothing; give --rates 0.01,0.02,0.05 or lists under [tune]")
    if not asked.base.get("holdout_size"):
        raise UsageError(f"{asked.where} holds nothing out, and tuning sees no test set; give --holdout-size")
    if seed in asked.seeds:
        raise UsageError(f"--tuning-seed {seed} is a seed of the runs that follow as well; choose another one")
    configurations = asked.configurations()
    for name in ("epochs", "steps", "train_size", "holdout_size", *asked.tune):
        if any(name in options for options in configurations) or (name in asked.tune and name in asked.base):
            raise UsageError(
                f"{asked.where}: {name} cannot be a setting of single configurations; all are tuned within one budget, "
                "over the same values; put it into [base]"
            )
    tried = [options | setting for options in configurations for setting in combinations(asked.tune)]
    return SweepFile(where=asked.where, base=asked.base, seeds=[seed], include=tried)


def choose(asked: SweepFile, agenda: SweepState) -> list[Tuned]:
    """The best settings of each configuration; of equals the one that stands first.

    Args:
        asked: the file.
        agenda: of its `tuning_sweep`, when that has ended.

    Raises:
        RunFailed: every setting of a configuration failed.
    """
    runs = {table_text(run.settings): run for run in agenda.runs}
    settings = combinations(asked.tune)
    chosen = []
    for options in asked.configurations():
        tried = [runs[text] for text in (table_text(options | each) for each in settings) if text in runs]
        if tried:  # else it is another one's double
            chosen.append(_best(options, tried, asked.tune, agenda))
    return chosen


def tuned_file(asked: SweepFile, tuned: Sequence[Tuned], seed: int) -> str:
    """A sweep file of the configurations with what was chosen for them, evaluated on the test set."""
    holdout_size = asked.base["holdout_size"]
    seeds = {"seeds": seeds_text(asked.seeds)} if asked.seeds else {}
    comment = f"# Written by bench tune: chosen on {holdout_size} held-out training samples with seed {seed}.\n"
    tables = [toml_table("[base]", evaluated_base(asked) | seeds)]
    tables += [toml_table("[[include]]", each.chosen) for each in tuned]
    return "\n".join([comment, *tables])


def evaluated_base(asked: SweepFile) -> Options:
    """What all runs share that follow: they train on all samples and see the test set."""
    return {name: value for name, value in asked.base.items() if name != "holdout_size"}


def _best(options: Options, tried: list[PlannedRun], lists: Lists, agenda: SweepState) -> Tuned:
    accuracies = {
        run.config.digest: agenda.past[run.config.digest].summary["test_accuracy"]
        for run in tried
        if agenda.progress(run) == "done"
    }
    if not accuracies:
        digest = tried[0].config.digest
        error = agenda.unrecorded.get(digest) or agenda.past[digest].summary["error"]
        failed = f"{table_text(options) or '[base]'} failed with every setting, first with: {error}"
        raise RunFailed(f"{failed}; look into their logs, or try other values")
    best = max(tried, key=lambda run: accuracies.get(run.config.digest, -1.0))
    values = {name: best.settings[name] for name in lists}
    return Tuned(
        settings=options,
        best=values,
        accuracy=accuracies[best.config.digest],
        rates_tried=len(tried),
        at_the_end=[name for name, value in values.items() if _is_at_the_end(value, lists[name])],
    )


def _is_at_the_end(value: object, values: list[object]) -> bool:
    numbers = [each for each in values if isinstance(each, (int, float)) and not isinstance(each, bool)]
    return len(numbers) == len(values) > 1 and value in (min(numbers), max(numbers))
