"""Compare predictions with the runs of a sweep file or with finished runs, and say which cases were not compared."""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from bench.core import environment, spec
from bench.core.config.run import VIRTUAL_HOSTS, RunConfig
from bench.core.errors import UsageError
from bench.core.files import files_below
from bench.core.rows import read_rows
from bench.core.run_folder import RunFolder, read_json
from bench.core.units import format_rate, format_seconds
from bench.deciding.speed import ERROR
from bench.extensions.predict.calibration import Calibration, Validated
from bench.extensions.predict.estimate import EstimatedCalibration
from bench.extensions.predict.options import PredictConfig
from bench.extensions.predict.prediction import Prediction
from bench.extensions.predict.request import DDP, PredictionRequest, check_request, links_of, predicted
from bench.extensions.predict.script_profile import Profile
from bench.hosts.cluster import Cluster, HostLink
from bench.launch.sweep_file import PlannedRun, table_text
from bench.launch.sweep_state import PastRun, SweepState
from bench.strategies.local import Local
from collectives.options import raise_first
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
    """One configuration of a sweep file or of finished runs, its prediction, and the values that its runs measured.

    Attributes:
        settings: the settings that the sweep file adds to `[base]`.
        request, prediction: the predicted job, and its prediction, made before the runs.
        runs: the planned runs, one per seed.
        num_runs: number of finished runs.
        measured: medians over the finished runs, by column; a median is None if no run has a value.
    """

    settings: str
    request: PredictionRequest
    prediction: Prediction
    runs: tuple[PlannedRun, ...]
    num_runs: int = 0
    measured: Mapping[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """Return predicted / measured - 1 for the step time; None if the step time was not measured."""
        step_time_s = self.measured.get("step_time_s")
        return None if step_time_s is None else self.prediction.step_time_s / step_time_s - 1


def check_machine(calibration: Calibration) -> None:
    """Check that this is the calibrated machine, so that measurements here can be compared with predictions.

    Raises:
        UsageError: this is another machine, or other kernels are in use.
    """
    kernels, machine = environment.kernels(), (environment.cpu_model(), environment.usable_cores())
    raise_first(
        UsageError,
        (
            (calibration.cpu, calibration.cores) != machine,
            f"the calibration is of another machine, {calibration.cpu} with {calibration.cores} cores; its predictions "
            "can only be compared with runs on that machine; run bench calibrate here first",
        ),
        (
            calibration.kernels != kernels,
            f"the calibration was made with {calibration.kernels} kernels, but {kernels} kernels are in use; run bench "
            "calibrate again",
        ),
    )


def cells_of(calibration: Calibration, runs: Iterable[PlannedRun]) -> list[ValidationCell]:
    """Return a cell with a prediction, but without measured values, for every configuration of these runs.

    Raises:
        UsageError: a configuration differs from the calibrated one in its model or options, or cannot be predicted.
    """
    by_configuration: dict[str, list[PlannedRun]] = {}
    for run in runs:
        by_configuration.setdefault(run.config.config_id, []).append(run)
    requests = [request_of_run(calibration, same[0].config) for same in by_configuration.values()]
    return [
        ValidationCell(
            settings=table_text(same[0].settings),
            request=request,
            prediction=predicted(calibration, request),
            runs=tuple(same),
        )
        for request, same in zip(requests, by_configuration.values(), strict=True)
    ]


def request_of_run(calibration: Calibration, config: RunConfig) -> PredictionRequest:
    """Return the checked request with which the step of a run is predicted.

    Args:
        calibration: the calibration of the machine on which the run is made.
        config: the complete configuration of the run.

    Raises:
        UsageError: the run's model, data set or options differ from the calibrated ones, or the run cannot be
            predicted.
    """
    # Only ddp has buckets; async_server pushes a layer when its calibrated bucket is ready.
    has_buckets = config.strategy.partition(":")[0] == DDP
    left_out = [word for name, word in _LEFT_OUT.items() if getattr(config, name)]
    raise_first(
        UsageError,
        *(
            (
                getattr(config, name) != getattr(calibration, name),
                f"{name} is {getattr(config, name)}, but was calibrated with {getattr(calibration, name)}; change the "
                "file, or run bench calibrate again",
            )
            for name in _AS_CALIBRATED
            if has_buckets or name != "bucket_mb"
        ),
        *(
            (
                getattr(config, option.name) != option.default,
                f"{option.flag_name} {getattr(config, option.name)} cannot be predicted; leave it out",
            )
            for option in RunConfig.options()
            if option.name in _FIXED
        ),
        (config.device == "cuda", "steps on GPUs cannot be predicted; use --device cpu"),
        (bool(left_out), f"links with {' and '.join(left_out)} cannot be predicted; leave these options out"),
    )
    hosts: tuple[HostLink, ...] = (HostLink(name="machine"),)
    ranks_per_host = config.world_size
    if config.cluster is not None:
        cluster = Cluster.from_dict(config.cluster)
        hosts, ranks_per_host = cluster.hosts, cluster.ranks_per_host
    request = PredictionRequest.of(config, hosts=hosts, ranks_per_host=ranks_per_host, shared_cores=calibration.cores)
    request = check_request(calibration, request)
    denser_epochs = cast(Compressor, spec.build("compressors", request.compressor)).traits.denser_epochs
    if config.epochs is not None:
        every = min(config.eval_every or config.epochs, config.epochs)
        if (math.ceil(config.epochs / every) - 1) * every < denser_epochs:  # epoch at which the last row begins
            raise UsageError(
                f"{request.compressor} sends more in the first {denser_epochs} epochs, and the timed steps of this run "
                "begin in these epochs; use --steps, warmup_epochs=0 or more --epochs"
            )
    return request


def compare(cells: Sequence[ValidationCell], agenda: SweepState) -> list[ValidationCell]:
    """Return the cells with the measured values of their finished runs.

    Args:
        cells: the result of `cells_of`.
        agenda: the runs of the sweep that have finished.
    """
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
        strategy, config = spec.build("strategies", cell.request.strategy), cell.runs[0].config
        if isinstance(strategy, Local) and strategy.steps == "auto" and measured["samples_per_s"]:
            # A run's own column `step_time_s` has the time of rank 0's steps only.
            measured["step_time_s"] = config.samples_per_step * config.world_size / measured["samples_per_s"]
        compared.append(dataclasses.replace(cell, num_runs=len(done), measured=measured))
    return compared


def as_rows(compared: Sequence[ValidationCell], calibration: Calibration) -> list[dict[str, Any]]:
    """Return one row per configuration: measured values by column, and predicted ones with the prefix `predicted_`."""
    return [
        {
            "model": calibration.model,
            "compressor": cell.request.compressor,
            "collective": cell.request.collective,
            "world_size": cell.request.world_size,
            "settings": cell.settings,
            "runs": cell.num_runs,
            "error": cell.error,
            "bound_by": cell.prediction.bound_by,
        }
        | {
            name: value
            for column in _PARTS
            for name, value in (
                (f"predicted_{column}", getattr(cell.prediction, column)),
                (column, cell.measured[column]),
            )
        }
        for cell in compared
    ]


def with_validated(calibration: Calibration, compared: Sequence[ValidationCell]) -> Calibration:
    """Return a copy of the calibration that also holds these comparisons of predicted and measured step times."""
    as_in_a_row = ("compressor", "collective", "world_size", "link_trace", "strategy", "trigger", "ranks_per_host")
    cells = [
        Validated(
            **{name: getattr(cell.request, name) for name in as_in_a_row},
            straggler=cell.request.straggler_text,
            bandwidth_bps=cell.request.slowest_bps,
            latency_s=max(host.latency_s for host in cell.request.hosts),
            predicted_s=cell.prediction.step_time_s,
            measured_s=measured_s,
            error=cell.error,
        )
        for cell in compared
        if (measured_s := cell.measured["step_time_s"]) is not None and cell.error is not None
    ]
    return dataclasses.replace(calibration, validated=tuple(dict.fromkeys([*calibration.validated, *cells])))


_PAIR = ("compressor", "collective")


def finished_runs(calibration: Calibration, folder: Path, tell: Callable[[str], None]) -> SweepState:
    """Return the finished runs in a folder whose steps this calibration can predict.

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
                reasons["repeated by a newer run"] += 1
            configs[config.digest], past[config.digest] = config, found
    listed = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    left_out = f": {listed}" if listed else "; give a folder of runs"
    if not past:
        raise UsageError(
            f"{folder} holds no finished run that this calibration can predict{left_out}; give a folder of runs "
            "of its model, batch size and machine"
        )
    if reasons:
        tell(f"note: {reasons.total()} of {len(folders)} runs are left out{left_out}")
    differing = [
        option.name
        for option in RunConfig.options()
        if option.flag and option.name != "seed" and (option.recorded.identity or option.flag.panel == VIRTUAL_HOSTS)
        if option.name in _PAIR or len({getattr(config, option.name) for config in configs.values()}) > 1
    ]
    runs = []
    for config in configs.values():
        values = {name: getattr(config, name) for name in differing if getattr(config, name) is not None}
        if "hosts" in values:
            values.pop("world_size", None)  # the number of hosts determines the number of ranks
        runs.append(PlannedRun(settings=values, config=config))
    return SweepState(runs=runs, out=folder, past=past)


def _checked(calibration: Calibration, run: PastRun) -> RunConfig:
    """Return the configuration of a run after checking that its step can be predicted.

    Raises:
        UsageError: the run did not finish, or its machine, model or options differ from the calibrated ones.
    """
    if run.state != "done":
        raise UsageError("not finished" if run.state == "torn" else "failed")
    try:
        config = RunConfig.from_json(run.folder.config)
    except UsageError:
        raise UsageError("written by another version of bench") from None
    if config.profile:
        raise UsageError("slowed down by --profile")
    calibrated = {"cpu": f"{calibration.cpu} ({calibration.cores} cores)", "kernels": calibration.kernels}
    for row in read_rows(run.folder.metrics):
        for name, known in calibrated.items():
            if row[name] != known:
                raise UsageError(f"made with {name} {row[name]}, calibrated with {known}")
    links_of(calibration, request_of_run(calibration, config))  # fails if a trace of the links cannot be read
    return config


NOT_CHECKED = "Not yet checked against real runs on this machine"


def latency_note(config: PredictConfig, request: PredictionRequest) -> list[str]:
    """Return a note that latency is taken as 0, if neither an option nor the cluster file gives a latency."""
    if len(request.hosts) == 1 or config.latency is not None or any(host.latency_s for host in request.hosts):
        return []
    how = "add --latency" if config.cluster_file is None else f"write it into {config.cluster_file}"
    return [f"The one-way delay is taken as 0, because none is given; {how} (half the time that ping shows)"]


# Largest errors of predicted steps in the checks that docs/reference/guides.md reports: of samples per second if ranks
# do not wait for each other, on a trace, with a slow rank, and with local steps.
UNEVEN, ON_TRACE, WITH_STRAGGLER, WITH_LOCAL = 0.60, 0.31, 0.25, 0.20
# Error that is assumed of an estimate from typical costs, which was not checked.
OF_ESTIMATE = 0.25


def error_of(calibration: Calibration, request: PredictionRequest) -> float:
    """Return the relative error that a prediction may have; smaller differences between methods mean nothing.

    This is the largest error in published checks of such predictions, or in those of this calibration if it is larger.
    """
    found = (
        (True, ERROR),
        (not request.waits, UNEVEN),
        (request.link_trace is not None, ON_TRACE),
        (request.straggler is not None, WITH_STRAGGLER),
        (request.is_local, WITH_LOCAL),
        (isinstance(calibration, EstimatedCalibration), OF_ESTIMATE),
        *((True, abs(cell.error)) for cell in _comparable(calibration, request)),
    )
    return max(error for applies, error in found if applies)


def notes(calibration: Calibration, request: PredictionRequest, *, range_too: bool = True) -> list[str]:
    """Return the notes that a user should read before trusting a prediction, one sentence each.

    Args:
        calibration: the calibration that the prediction was made from.
        request: the request that was predicted.
        range_too: True to add how the request differs from the runs that predictions were checked against.
    """
    said = calibration.said if isinstance(calibration, EstimatedCalibration | Profile) else ""
    machine = environment.cpu_model(), environment.usable_cores()
    errors = [abs(cell.error) for cell in _comparable(calibration, request)]
    where = f", whose ranks shared {calibration.cores} core(s), unlike these"
    reason = outside(calibration, request) if range_too else None
    found = (
        (said != "", said),
        (
            not isinstance(calibration, EstimatedCalibration) and machine != (calibration.cpu, calibration.cores),
            f"Measured on another machine ({calibration.cpu}, {calibration.cores} cores); the prediction is for that "
            "machine",
        ),
        (bool(calibration.cut), f"The calibration had little time: {', '.join(calibration.cut)}"),
        (
            any(host.jitter_s or host.loss for host in request.hosts),
            "The prediction leaves out the jitter and the loss of links",
        ),
        (reason is not None, f"{NOT_CHECKED}: {reason}"),
        (
            bool(errors),
            f"Such step times were checked against {len(errors)} real run(s)"
            f"{where if request.shared_cores != calibration.cores else ''}: off by "
            f"{statistics.median(errors or [0.0]):.1%} in the median, by {max(errors, default=0.0):.1%} at most",
        ),
    )
    return [sentence for applies, sentence in found if applies]


def range_notes(calibration: Calibration, requests: Sequence[PredictionRequest]) -> list[str]:
    """Return a note that says how many requests differ from the runs that predictions were checked against."""
    reasons = [reason for request in requests if (reason := outside(calibration, request))]
    if not reasons:
        return []
    some = "" if len(reasons) == len(requests) else f" for {len(reasons)} of {len(requests)} predictions"
    same = f": {reasons[0]}" if len(set(reasons)) == 1 else ""
    return [f"{NOT_CHECKED}{some}{same}"]


def _comparable(calibration: Calibration, request: PredictionRequest) -> list[Validated]:
    """Return the validated configurations with the same strategy, trigger, straggler and link trace as the request."""
    wanted = request.strategy, request.trigger, request.straggler_text, request.link_trace
    return [
        cell
        for cell in calibration.validated
        if (cell.strategy, cell.trigger, cell.straggler, cell.link_trace) == wanted
    ]


def outside(calibration: Calibration, request: PredictionRequest) -> str | None:
    """Return the reason why a request is outside the range that was checked against real runs; None if it is inside."""
    if not calibration.validated:
        return calibration.how_to_check
    wanted, checked = (request.strategy, request.trigger, request.straggler_text), _comparable(calibration, request)
    beside = "without a straggler" if request.straggler is None else f"with the straggler {request.straggler}"
    name, latency = request.collective.partition(":")[0], max(host.latency_s for host in request.hosts)
    sizes = [cell.world_size for cell in checked] or [0]
    rates = [cell.bandwidth_bps for cell in checked if cell.bandwidth_bps is not None]
    is_limited, slowest_bps = request.slowest_bps is not None, request.slowest_bps or 0.0
    measured = f"{format_rate(min(rates))} to {format_rate(max(rates))}" if rates else "only links without a limit"
    reasons = (
        (
            not any((cell.strategy, cell.trigger, cell.straggler) == wanted for cell in calibration.validated),
            f"{request.strategy} {beside}, trigger {request.trigger}, was not measured",
        ),
        (not checked, f"links that follow {request.link_trace or 'no trace'} were not measured"),
        (
            (request.compressor, name)
            not in {(cell.compressor, cell.collective.partition(":")[0]) for cell in checked},
            f"{request.compressor} on {name} was not measured",
        ),
        (
            not min(sizes) <= request.world_size <= max(sizes),
            f"{request.world_size} ranks; {min(sizes)} to {max(sizes)} were measured",
        ),
        (
            request.ranks_per_host not in {cell.ranks_per_host for cell in checked},
            f"{request.ranks_per_host} rank(s) on a host were not measured",
        ),
        (not is_limited and len(rates) == len(checked), "links that are not limited were not measured"),
        (
            is_limited and not (rates and min(rates) <= slowest_bps <= max(rates)),
            f"{format_rate(slowest_bps)}; {measured} were measured",
        ),
        (
            latency > max((cell.latency_s for cell in checked), default=0.0),
            f"a one-way delay of {format_seconds(latency)} is longer than any that was measured",
        ),
    )
    return next((sentence for applies, sentence in reasons if applies), None)
