"""Comparison of predictions with runs for `bench predict --validate`: runs of a sweep file, or finished runs."""

from __future__ import annotations

import collections
import csv
import dataclasses
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from bench.core import environment, spec
from bench.core.config.job import VIRTUAL_HOSTS
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.files import files_below
from bench.core.rows import read_rows
from bench.core.run_folder import RunFolder, read_json
from bench.extensions.predict.calibration import Calibration, Validated
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.request import PredictionRequest, check_request, waits
from bench.extensions.predict.step import links_of, predicted
from bench.hosts.cluster import Cluster, HostLink
from bench.launch.sweeps.file import PlannedRun, table_text
from bench.launch.sweeps.state import PastRun, SweepState
from compressors.base import Compressor

_AS_CALIBRATED = ("model", "dataset", "optimizer", "batch_size", "augment", "threads", "bucket_mb")
# Columns that are both predicted and measured.
_PARTS = (
    "step_time_s", "exposed_s", "encode_s", "cpu_s_per_step", "samples_per_s", "payload_bytes_per_step",
    "messages_per_step",
)  # fmt: skip
_FIXED = ("accumulate", "amp", "nnodes", "nonfinite")
_LEFT_OUT = {"jitter_s": "jitter", "loss_ratio": "loss"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationCell:
    """One configuration of a sweep and its prediction.

    Attributes:
        settings: the settings that the sweep file adds to `[base]`.
        request, prediction: the prediction, made before the runs.
        runs: the planned runs, one per seed.
    """

    settings: str
    request: PredictionRequest
    prediction: Prediction
    runs: tuple[PlannedRun, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """A cell and its measured values.

    Attributes:
        num_runs: number of finished runs.
        measured: medians over the runs, by column; None if no run has a value.
    """

    cell: ValidationCell
    num_runs: int
    measured: Mapping[str, float | None]

    @property
    def step_time_s(self) -> float | None:
        """Return the measured seconds of a step."""
        return self.measured["step_time_s"]

    @property
    def error(self) -> float | None:
        """Return predicted / measured - 1 of the step time; None if it was not measured."""
        return None if self.step_time_s is None else self.cell.prediction.step_time_s / self.step_time_s - 1


def check_machine(calibration: Calibration) -> None:
    """Check that this is the calibrated machine, so that measurements here can be compared with predictions.

    Raises:
        UsageError: this is another machine, or other kernels are in use.
    """
    if (calibration.cpu, calibration.cores) != (environment.cpu_model(), environment.usable_cores()):
        raise UsageError(
            f"the calibration is of another machine, {calibration.cpu} with {calibration.cores} cores; its predictions "
            "can only be compared with runs on that machine; calibrate here first"
        )
    if calibration.kernels != (kernels := environment.kernels()):
        raise UsageError(f"the calibration is of {calibration.kernels} kernels, these are {kernels}; calibrate again")


def cells_of(calibration: Calibration, runs: Iterable[PlannedRun]) -> list[ValidationCell]:
    """Predict every configuration of a plan.

    Raises:
        UsageError: a configuration differs from the calibrated one.
    """
    by_configuration: dict[str, list[PlannedRun]] = {}
    for run in runs:
        by_configuration.setdefault(run.config.config_id, []).append(run)
    cells = []
    for of_one in by_configuration.values():
        request = request_of_run(calibration, of_one[0].config)
        cells.append(
            ValidationCell(
                settings=table_text(of_one[0].settings),
                request=request,
                prediction=predicted(calibration, request),
                runs=tuple(of_one),
            )
        )
    return cells


def request_of_run(calibration: Calibration, config: RunConfig) -> PredictionRequest:
    """Return the checked request for the prediction of a run.

    Args:
        calibration: the calibration of the machine of the run.
        config: the complete configuration of the run.

    Raises:
        UsageError: the run differs from what was calibrated, or cannot be predicted.
    """
    for name in _AS_CALIBRATED:
        if name == "bucket_mb" and not waits(config.strategy):
            continue  # layers are pushed one by one; the prediction pushes them when their calibrated bucket is ready
        if (value := getattr(config, name)) != (known := getattr(calibration, name)):
            raise UsageError(f"{name} is {value}, but was calibrated with {known}; change the file or calibrate again")
    for option in RunConfig.options():
        if option.name in _FIXED and getattr(config, option.name) != option.default:
            raise UsageError(
                f"{option.flag_name} {getattr(config, option.name)} is not part of the model; leave it out"
            )
    if config.device == "cuda":
        raise UsageError("GPUs are not part of the model; use --device cpu")
    if left_out := [word for name, word in _LEFT_OUT.items() if getattr(config, name)]:
        raise UsageError(f"links with {' and '.join(left_out)} are not part of the model; leave these options out")
    hosts: tuple[HostLink, ...] = (HostLink(name="machine"),)
    ranks_per_host = config.world_size
    if config.cluster is not None:
        cluster = Cluster.from_dict(config.cluster)
        hosts, ranks_per_host = cluster.hosts, cluster.ranks_per_host
    request = PredictionRequest.of(config, hosts=hosts, ranks_per_host=ranks_per_host, shared_cores=calibration.cores)
    request = check_request(calibration, request)
    compressor = cast(Compressor, spec.build("compressors", request.compressor))
    if config.epochs is not None and _last_interval_begins(config.epochs, config) < compressor.denser_epochs:
        raise UsageError(
            f"{request.compressor} sends more in the first {compressor.denser_epochs} epochs, to which the timed steps "
            "of this run belong; use --steps, warmup_epochs=0 or more --epochs"
        )
    return request


def _last_interval_begins(epochs: int, config: RunConfig) -> int:
    """Return the number of epochs after which the interval of a run's last row begins."""
    every = min(config.eval_every or epochs, epochs)
    return (epochs - 1) // every * every


def compare(cells: Sequence[ValidationCell], agenda: SweepState) -> list[Compared]:
    """Return every cell with the measured values of its finished runs."""
    compared = []
    for cell in cells:
        done = [agenda.past[run.config.digest] for run in cell.runs if agenda.progress(run) == "done"]
        rows = [list(read_rows(run.folder.metrics)) for run in done]
        measured: dict[str, float | None] = {}
        for column in _PARTS:
            # Each run's last value that is not None: a row that was written soon after a restart has no step time.
            known = [[row[column] for row in of_run if row[column] is not None] for of_run in rows]
            last = [values[-1] for values in known if values]
            measured[column] = statistics.median(last) if last else None
        compared.append(Compared(cell=cell, num_runs=len(done), measured=measured))
    return compared


def as_rows(compared: Sequence[Compared], calibration: Calibration) -> list[dict[str, Any]]:
    """Return one row per cell: measured values, and predicted values with the prefix `predicted_`."""
    rows = []
    for each in compared:
        request, prediction = each.cell.request, each.cell.prediction
        rows.append(
            {
                "model": calibration.model,
                "compressor": request.compressor,
                "collective": request.collective,
                "world_size": request.world_size,
                "settings": each.cell.settings,
                "runs": each.num_runs,
                "error": each.error,
                "bound_by": prediction.bound_by,
            }
            | {
                name: value
                for column in _PARTS
                for name, value in (
                    (f"predicted_{column}", getattr(prediction, column)),
                    (column, each.measured[column]),
                )
            }
        )
    return rows


def write_table(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the table as CSV.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another --table") from None


def with_validated(calibration: Calibration, compared: Sequence[Compared]) -> Calibration:
    """Return the calibration with these comparisons added."""
    cells = [
        Validated(
            compressor=each.cell.request.compressor,
            collective=each.cell.request.collective,
            world_size=each.cell.request.world_size,
            bandwidth_bps=each.cell.request.slowest_bps,
            link_trace=each.cell.request.link_trace,
            latency_s=max(host.latency_s for host in each.cell.request.hosts),
            predicted_s=each.cell.prediction.step_time_s,
            measured_s=each.step_time_s,
            error=each.error,
            strategy=each.cell.request.strategy,
            trigger=each.cell.request.trigger,
            ranks_per_host=each.cell.request.ranks_per_host,
            straggler=each.cell.request.straggler_text,
        )
        for each in compared
        if each.step_time_s is not None and each.error is not None
    ]
    return dataclasses.replace(calibration, validated=tuple(dict.fromkeys([*calibration.validated, *cells])))


_PAIR = ("compressor", "collective")


def finished_runs(calibration: Calibration, folder: Path, tell: Callable[[str], None]) -> SweepState:
    """Return the finished runs in a folder that this calibration can predict.

    Args:
        calibration: the calibration of the machine of the runs.
        folder: the folder of a run, or a folder that contains runs at any depth.
        tell: called with a sentence that says how many runs are left out, and why.

    Raises:
        UsageError: no run can be predicted.
    """
    configs, past, reasons = {}, {}, collections.Counter[str]()
    folders = [RunFolder(file.parent) for file in files_below(folder, "metrics.csv")]
    for run in sorted(folders, key=lambda each: each.run_id):  # of runs with the same digest, the newest is used
        found = PastRun(folder=run, summary=read_json(run.status) or {})
        try:
            config = _checked(calibration, found)
        except UsageError as refusal:
            reasons[str(refusal).partition(";")[0]] += 1  # without the advice after the semicolon
        else:
            if config.digest in past:
                reasons["repeated later"] += 1
            configs[config.digest], past[config.digest] = config, found
    if not past:
        raise UsageError(
            f"{folder} holds no finished run that this calibration can predict{_said(reasons)}; give a folder of runs "
            "of its model, batch size and machine"
        )
    if reasons:
        tell(f"note: {reasons.total()} of {len(folders)} runs are left out{_said(reasons)}")
    names = _telling_apart(configs.values())
    runs = [PlannedRun(settings=_settings(config, names), config=config) for config in configs.values()]
    return SweepState(runs=runs, out=folder, past=past)


def _checked(calibration: Calibration, run: PastRun) -> RunConfig:
    """Return a run's configuration.

    Raises:
        UsageError: the run did not finish, or differs from what was calibrated.
    """
    if run.state != "done":
        raise UsageError("not finished" if run.state == "torn" else "failed")
    try:
        config = RunConfig.from_json(run.folder.config)
    except UsageError:
        raise UsageError("written by another version") from None
    if config.profile:
        raise UsageError("slowed down by --profile")
    calibrated = {"cpu": f"{calibration.cpu} ({calibration.cores} cores)", "kernels": calibration.kernels}
    for row in read_rows(run.folder.metrics):
        for name, known in calibrated.items():
            if row[name] != known:
                raise UsageError(f"made with {name} {row[name]}, calibrated with {known}")
    links_of(calibration, request_of_run(calibration, config))  # fails if a trace of the links cannot be read
    return config


def _said(reasons: collections.Counter[str]) -> str:
    """Return the reasons and their counts as text, the most frequent first."""
    texts = [f"{reason} ({count})" for reason, count in reasons.most_common()]
    return f": {'; '.join(texts)}" if texts else "; give a folder of runs"


def _telling_apart(configs: Collection[RunConfig]) -> list[str]:
    """Return the names of the options that differ among the configurations; compressor and collective are included."""
    told = [
        option.name
        for option in RunConfig.options()
        if option.flag and option.name != "seed" and (option.recorded.identity or option.flag.panel == VIRTUAL_HOSTS)
    ]
    return [name for name in told if name in _PAIR or len({getattr(config, name) for config in configs}) > 1]


def _settings(config: RunConfig, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if "hosts" in values:
        values.pop("world_size", None)  # it follows from the hosts
    return values
