"""Finished runs that predictions are held against, without a run more."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from bench.core.config.job import VIRTUAL_HOSTS
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.files import files_below
from bench.core.rows import read_rows
from bench.core.run_folder import RunFolder, read_json
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.job_links import links_of
from bench.extensions.predict.validating import asked_of
from bench.launch.sweeps.file import PlannedRun
from bench.launch.sweeps.state import PastRun, SweepState

_PAIR = ("compressor", "collective")


def finished_runs(calibration: Calibration, folder: Path, tell: Callable[[str], None]) -> SweepState:
    """The runs below a folder that this calibration can predict.

    Args:
        calibration: of the machine on which they were made.
        folder: one run's, or one that holds some, however deep.
        tell: is told how many are left out, and why.

    Raises:
        UsageError: none can be predicted.
    """
    configs, past, reasons = {}, {}, collections.Counter[str]()
    folders = [RunFolder(file.parent) for file in files_below(folder, "metrics.csv")]
    for run in sorted(folders, key=lambda each: each.run_id):  # the newest stands for its digest
        found = PastRun(folder=run, summary=read_json(run.status) or {})
        try:
            config = _checked(calibration, found)
        except UsageError as refusal:
            reasons[str(refusal).partition(";")[0]] += 1  # without what to do about it
        else:
            if config.digest in past:
                reasons["repeated later"] += 1
            configs[config.digest], past[config.digest] = config, found
    if not past:
        raise UsageError(
            f"{folder} holds no finished run that this calibration predicts{_said(reasons)}; give a folder of runs of "
            "its model, batch and machine"
        )
    if reasons:
        tell(f"note: {reasons.total()} of {len(folders)} runs are left out{_said(reasons)}")
    names = _telling_apart(configs.values())
    runs = [PlannedRun(settings=_settings(config, names), config=config) for config in configs.values()]
    return SweepState(runs=runs, out=folder, past=past)


def _checked(calibration: Calibration, run: PastRun) -> RunConfig:
    """Its configuration.

    Raises:
        UsageError: it did not end well, or was made with what the calibration knows nothing of.
    """
    if run.state != "done":
        raise UsageError("not finished" if run.state == "torn" else "failed")
    try:
        config = RunConfig.from_json(run.folder.config)
    except UsageError:
        raise UsageError("written by another version") from None
    if config.profile:
        raise UsageError("slower for --profile")
    calibrated = {"cpu": f"{calibration.cpu} ({calibration.cores} cores)", "kernels": calibration.kernels}
    for row in read_rows(run.folder.metrics):
        for name, known in calibrated.items():
            if row[name] != known:
                raise UsageError(f"made with {name} {row[name]}, calibrated with {known}")
    links_of(calibration, asked_of(calibration, config))  # reads the traces that they followed
    return config


def _said(reasons: collections.Counter[str]) -> str:
    """The reasons and how often each was met; those that were met most come first."""
    texts = [f"{reason} ({count})" for reason, count in reasons.most_common()]
    return f": {'; '.join(texts)}" if texts else "; give a folder of runs"


def _telling_apart(configs: Collection[RunConfig]) -> list[str]:
    """The pair, and whatever else differs among configurations."""
    told = [
        option.name
        for option in RunConfig.options()
        if option.flag and option.name != "seed" and (option.recorded.identity or option.flag.panel == VIRTUAL_HOSTS)
    ]
    return [name for name in told if name in _PAIR or len({getattr(config, name) for config in configs}) > 1]


def _settings(config: RunConfig, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if "hosts" in values:
        values.pop("world_size", None)  # it says nothing more
    return values
