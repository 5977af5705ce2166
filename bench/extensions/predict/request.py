"""Requests for predictions: build a request from the options of `bench predict` or from a run, check and predict it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np

from bench.core import spec
from bench.core.config.configuration import NOT_GIVEN
from bench.core.config.run import MAX_RANKS, RunConfig
from bench.core.config.syntax import Straggler
from bench.core.counters import FRAME_BYTES, FRAME_HEADER_BYTES
from bench.core.errors import UsageError
from bench.core.units import MAX_RATE_BPS
from bench.extensions.async_server.strategy import AsyncServer
from bench.extensions.predict import prediction
from bench.extensions.predict.asynchronous import predict_async
from bench.extensions.predict.calibrating import cannot_be_calibrated, denser_epochs
from bench.extensions.predict.calibration import FORWARDED, FRAMES, LOCAL, SEGMENTS, Calibration
from bench.extensions.predict.contention import Computing, Job
from bench.extensions.predict.links import Links, TraceClock
from bench.extensions.predict.local_steps import predict_local
from bench.extensions.predict.options import MOST_RANKS, MOST_TOGETHER, PredictConfig
from bench.extensions.predict.prediction import Prediction, predict
from bench.hosts.cluster import HostLink, Trace, has_real_frames
from bench.hosts.cluster_options import cluster_from_toml, link_of, link_texts
from bench.launch.plan import build_components
from bench.launch.refusals import straggler_refusals
from bench.strategies.local import Local
from collectives.base import Collective
from collectives.direct import on_links
from collectives.hierarchical import Hierarchical
from collectives.options import Incompatible, raise_first
from collectives.refusals import refuse
from collectives.schedule.rounds import Layout
from collectives.schedule.waves import Lengths, waves_of

T = TypeVar("T")
DDP = "ddp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """A request for a prediction: a compressor and a collective on given ranks and links.

    Attributes:
        compressor, collective, strategy: texts such as "topk:ratio=0.01"; once the request is checked, without the
            options that have their default.
        hosts: the link of each host.
        ranks_per_host: number of ranks on each host, which share its link.
        shared_cores: number of cores that all hosts share; None if each host has those of the calibrated machine.
        trigger: as in `metrics.csv`.
        straggler: a rank that is slowed down on purpose; None if there is none.
    """

    compressor: str
    collective: str
    hosts: tuple[HostLink, ...]
    ranks_per_host: int
    shared_cores: int | None
    trigger: Literal["async", "sync"]
    strategy: str = DDP
    straggler: Straggler | None = None

    @classmethod
    def of(
        cls,
        config: PredictConfig | RunConfig,
        *,
        hosts: tuple[HostLink, ...],
        ranks_per_host: int,
        shared_cores: int | None,
    ) -> Self:
        """Build an unchecked request from the options that predictions and runs share, and from hosts and cores."""
        return cls(
            compressor=config.compressor,
            collective=config.collective,
            hosts=hosts,
            ranks_per_host=ranks_per_host,
            shared_cores=shared_cores,
            trigger=config.trigger,
            strategy=config.strategy,
            straggler=Straggler.parse(config.straggler) if config.straggler else None,
        )

    @property
    def waits(self) -> bool:
        """Return True if ranks wait for each other, either in every step or, with `local`, at every exchange."""
        return self.strategy.partition(":")[0] != "async_server"

    @property
    def is_ddp(self) -> bool:
        """Return True if ranks sum gradients in every step."""
        return self.strategy.partition(":")[0] == DDP

    @property
    def is_local(self) -> bool:
        """Return True if ranks train alone for some steps, then exchange differences of their parameters."""
        return self.strategy.partition(":")[0] == "local"

    @property
    def straggler_text(self) -> str | None:
        """Return the straggler as `metrics.csv` names it, like "rank=1,slowdown=3"; None if there is none."""
        return None if self.straggler is None else str(self.straggler)

    @property
    def slowest_bps(self) -> float | None:
        """Return the slowest rate of any link in bits per second; None if no link is limited.

        A link that follows a trace counts with its mean rate.
        """
        return min((rate for host in self.hosts for rate in host.mean_rates if rate is not None), default=None)

    @property
    def link_trace(self) -> str | None:
        """Return the names of the traces that links follow, as in `metrics.csv`; None if all rates are constant."""
        return ", ".join(dict.fromkeys(trace.label for host in self.hosts for trace in host.traces if trace)) or None

    @property
    def world_size(self) -> int:
        """Return the number of ranks on all hosts."""
        return len(self.hosts) * self.ranks_per_host

    def load(self, calibration: Calibration) -> float:
        """Return the load while all ranks compute: number of threads / number of cores that the threads share."""
        if self.shared_cores is None:
            return self.ranks_per_host * calibration.threads / calibration.cores
        return self.world_size * calibration.threads / self.shared_cores

    def at_rate(self, bandwidth_bps: float) -> PredictionRequest:
        """Return the same request with all links at this rate in both directions.

        Raises:
            UsageError: hosts already have rates or follow a trace, or ranks do not wait for each other.
        """
        if not self.waits:
            raise UsageError(f"--sweep needs ranks that wait for each other; leave out --strategy {self.strategy}")
        if self.link_trace:
            raise UsageError("--sweep sets the rate of all links, which is then constant; leave out the trace")
        if any(rate is not None for host in self.hosts for rate in (host.uplink_bps, host.downlink_bps)):
            raise UsageError("--sweep sets the rate of all links; remove the rates of the hosts from the cluster file")
        hosts = [dataclasses.replace(host, uplink_bps=bandwidth_bps, downlink_bps=bandwidth_bps) for host in self.hosts]
        return dataclasses.replace(self, hosts=tuple(hosts))


BASELINE = "bf16"
# Strategies whose steps can be predicted.
PREDICTED = (DDP, "local", "async_server")
# Most ranks of async_server that are simulated; with more ranks, a simulation would take minutes.
MOST_PUSHING = 512
ONE_BYTE = Lengths(lambda start, stop, terms: (np.ones_like(start), np.ones_like(start)))


def check(config: PredictConfig, calibration: Calibration) -> PredictionRequest:
    """Build a request from the options of `bench predict`, check the request, and return it.

    If the options name no collective, the request has the collective that a run would choose.

    Raises:
        UsageError: a component is unknown or not calibrated, the components are incompatible, or the collective does
            not describe its rounds of messages.
    """
    return check_request(calibration, request_from_options(config))


def request_from_options(config: PredictConfig) -> PredictionRequest:
    """Build an unchecked request from the options of `bench predict`; without a compressor, gradients are uncompressed.

    Raises:
        UsageError: options of hosts or links contradict each other, or there are too many ranks.
    """
    texts, ranks_per_host = link_texts(config), config.ranks_per_host
    if config.cluster_file is not None:
        named = [f"--{key}" for key in texts] + [f"--{key}" for key in ("hosts", "world_size") if getattr(config, key)]
        if named or ranks_per_host > 1:
            other = (*named, "--ranks-per-host")[0].replace("_", "-")
            raise UsageError(f"--cluster and {other} both describe the hosts; describe them in the file only")
        cluster = cluster_from_toml(Path(config.cluster_file))
        hosts, ranks_per_host = cluster.hosts, cluster.ranks_per_host
    else:
        number = config.hosts or max(1, (config.world_size or 2) // ranks_per_host)
        if config.world_size not in (None, number * ranks_per_host):
            raise UsageError(
                f"--world-size {config.world_size} is not {number} hosts with {ranks_per_host} rank(s) each; leave out "
                "one of these options"
            )
        hosts = (link_of(texts),) * number
    most, where = (MOST_RANKS, "") if ranks_per_host == 1 else (MOST_TOGETHER, ", or one rank per host")
    if (number := len(hosts) * ranks_per_host) > most:
        raise UsageError(f"{number} ranks are more than can be predicted; choose at most {most}{where}")
    config = config.choose(compressor="none")
    return PredictionRequest.of(config, hosts=hosts, ranks_per_host=ranks_per_host, shared_cores=config.shared_cores)


def check_request(calibration: Calibration, request: PredictionRequest) -> PredictionRequest:
    """Check a request, and return it with compressor, collective and strategy as specs.

    Components that the user did not name get their defaults. Options that have their default values are left out of the
    specs, as in "topk:ratio=0.05".

    Raises:
        UsageError: a component is unknown or not calibrated, the components are incompatible, or the collective does
            not describe its rounds of messages.
    """
    run = RunConfig(
        compressor=request.compressor,
        collective=request.collective or NOT_GIVEN,
        strategy=request.strategy,
        # Of the optimizer of a profiled script, only the name is known.
        optimizer=RunConfig.optimizer if request.is_ddp else calibration.optimizer,
        world_size=min(request.world_size, MAX_RANKS),  # more ranks can be predicted than run
        trigger=request.trigger,
        device="cpu",
    )
    parts = build_components(run)
    name, text = parts.strategy.component_name, str(parts.compressor)
    raise_first(
        UsageError,
        (request.world_size < 2, "one rank exchanges nothing; give --world-size 2 or more"),
        (name not in PREDICTED, f"steps of {name} cannot be predicted; choose {', '.join(PREDICTED)}"),
        (
            not request.waits and request.world_size > MOST_PUSHING,
            f"{request.world_size} ranks of async_server cannot be simulated; choose at most {MOST_PUSHING}",
        ),
        (
            not request.is_ddp and request.link_trace is not None,
            f"a rate that changes over time cannot be predicted with {name}; give the hosts a constant one",
        ),
        (
            text not in calibration.encoded,
            cannot_be_calibrated(parts.compressor)
            or f"{text} is not in the {calibration.kind}, which holds {', '.join(calibration.encoded)}; name it in "
            f"{calibration.command} --compressors",
        ),
    )
    with spec.usage_errors():
        refuse(straggler_refusals, request.straggler, request.world_size)
        parts.compressor.check_compatible(parts.collective)
        check_predictable(parts.collective)
        refuse(parts.collective.rank_refusals, request.world_size)
        if not request.is_ddp:
            refuse(parts.strategy.refusals, run, parts.compressor, parts.collective, parts.optimizer)
    return dataclasses.replace(request, compressor=text, collective=str(parts.collective), strategy=str(parts.strategy))


def check_predictable(collective: Collective) -> None:
    """Check that a collective describes the messages of its sums, so that the messages can be simulated.

    Raises:
        Incompatible: "native does not say what its ranks send, so it cannot be predicted; try ring or tree".
    """
    for part in [collective.within, collective.between] if isinstance(collective, Hierarchical) else [collective]:
        if waves_of(part, 2, Layout.dense(2, key=(0,)), ONE_BYTE) is None:
            raise Incompatible(
                f"{part.component_name} does not say what its ranks send, so it cannot be predicted; try ring or tree"
            )


# Bytes of a full Ethernet frame / bytes of TCP payload in it; TCP headers have timestamps.
FRAME_PER_PAYLOAD = FRAME_BYTES / (FRAME_BYTES - FRAME_HEADER_BYTES)
# Bytes of acknowledgements per byte of messages: one header without payload per two frames (RFC 1122, 4.2.3.2).
ACK_SHARE = FRAME_HEADER_BYTES / (2 * FRAME_BYTES)
MS_PER_S = 1e3


def links_of(calibration: Calibration, request: PredictionRequest) -> Links:
    """Return the links between the requested ranks; rates are bytes of TCP payload per second, without frame headers.

    Raises:
        UsageError: the file of a trace is missing, or has changed.
    """
    path = _path_of_messages(calibration, request)
    framed, acked = (1.0, 0.0) if path == SEGMENTS else (FRAME_PER_PAYLOAD, ACK_SHARE)
    costs = calibration.messages.get(path, calibration.messages[LOCAL])
    up_rate, down_rate = (
        np.array([math.inf if bps is None else bps / 8 / framed for bps in rates])
        for rates in zip(*(host.mean_rates for host in request.hosts), strict=True)
    )
    clocks: dict[Trace | None, TraceClock] = {  # each trace is read once
        trace: TraceClock(np.array(trace.opportunities()) / MS_PER_S)
        for trace in dict.fromkeys(trace for host in request.hosts for trace in host.traces)
        if trace
    }
    up_paces, down_paces = zip(*([clocks.get(trace) for trace in host.traces] for host in request.hosts), strict=True)
    crowded_wake_s, known = 0.0, calibration.crowds[-1].load
    # The extra time until a waiting rank continues grows linearly with the load above one thread per core.
    if request.shared_cores is not None and known > 1:
        crowded_wake_s = calibration.crowded_wake_s * max(0.0, request.load(calibration) - 1) / (known - 1)
    return Links(
        host_of=np.repeat(np.arange(len(request.hosts)), request.ranks_per_host),
        up_rate=up_rate,
        down_rate=down_rate,
        up_paces=up_paces,
        down_paces=down_paces,
        latency_s=np.array([host.latency_s for host in request.hosts]),
        ack_share=acked,
        message_s=costs.message_s + calibration.around_message_s,
        per_byte_s=costs.per_byte_s,
        wake_s=costs.wake_s,
        crowded_wake_s=crowded_wake_s,
        carry_byte_s=costs.carry_byte_s,
        carriers=1 if path == FORWARDED else request.shared_cores or 1,  # the forwarder is one thread
    )


def _path_of_messages(calibration: Calibration, request: PredictionRequest) -> str:
    """Return how messages travel between hosts: LOCAL, FORWARDED, FRAMES or SEGMENTS (keys of `Calibration.messages`).

    LOCAL is used for links between machines and for a single host. Between virtual hosts that share cores, a thread
    forwards the frames of links with a trace or a delay, if the cost of forwarding was measured. Otherwise the kernel
    carries messages as real frames or as large segments.
    """
    if request.shared_cores is None or len(request.hosts) == 1:
        return LOCAL
    if FORWARDED in calibration.messages and (request.link_trace or any(host.latency_s for host in request.hosts)):
        return FORWARDED
    return FRAMES if request.link_trace or has_real_frames(request.hosts) else SEGMENTS


def predicted(calibration: Calibration, request: PredictionRequest) -> Prediction:
    """Predict a step of a checked request.

    Raises:
        UsageError: there are too many ranks for a simulation, or the file of a trace is missing or has changed.
    """
    strategy = spec.build("strategies", request.strategy)
    if isinstance(strategy, AsyncServer):
        return predict_async(calibration, _job(calibration, request), strategy)
    if isinstance(strategy, Local):
        return predict_local(calibration, _job(calibration, request), _collective(request), strategy)
    return _of_step(predict, calibration, request)


def least_step_s(calibration: Calibration, request: PredictionRequest) -> float:
    """Return a lower bound of the predicted seconds of a checked request's step, which takes less time to compute.

    Return 0 if no bound is known.
    """
    return _of_step(prediction.least_step_s, calibration, request) if request.is_ddp else 0.0


def step_without_exchange_s(calibration: Calibration, request: PredictionRequest) -> float:
    """Return the predicted seconds of the slowest rank's step if ranks exchange nothing, for a checked request."""
    computing = Computing.of_ranks(calibration, _job(calibration, request))
    *_, computed = computing.reached(np.zeros(request.world_size))
    return float((computed + computing.factor * calibration.update_s).max())


def _of_step(compute: Callable[..., T], calibration: Calibration, request: PredictionRequest) -> T:
    """Call `predict`, or another function of the same arguments, for a step in which all ranks wait for each other."""
    job = _job(calibration, request)
    plain = (request.compressor, request.collective, request.trigger) == ("none", "native", "async")
    if plain:  # DDP by itself, which encodes nothing
        job = dataclasses.replace(
            job,
            encoded=[dataclasses.replace(bucket, work_s=(0.0,) * len(bucket.work_s)) for bucket in job.encoded],
        )
    return compute(calibration, job, _collective(request), in_hook=not plain, starts_early=request.trigger == "async")


def _job(calibration: Calibration, request: PredictionRequest) -> Job:
    return Job(
        encoded=calibration.encoded[request.compressor],
        links=links_of(calibration, request),
        slower=np.repeat([1 / host.cpu_share for host in request.hosts], request.ranks_per_host),
        load=request.load(calibration),
        shared_cores=request.shared_cores,
        straggler=request.straggler,
    )


def _collective(request: PredictionRequest) -> Collective:
    rates = tuple(
        min(rate or MAX_RATE_BPS for rate in host.mean_rates)
        for host in request.hosts
        for _ in range(request.ranks_per_host)
    )
    return on_links(cast(Collective, spec.build("collectives", request.collective)), rates)


def predicted_in_first_epoch(calibration: Calibration, request: PredictionRequest) -> Prediction | None:
    """Predict a step of a checked request in the first epoch; None if the compressor then sends as much as later.

    Raises:
        UsageError: as `predicted`.
    """
    if request.compressor not in calibration.first_epoch:
        return None
    return predicted(dataclasses.replace(calibration, encoded=calibration.first_epoch), request)


# Columns that are predicted only if a rate changes over time; the windows only if steps are also shorter than the
# trace.
OVER_TIME = ("step_time_p95_s", "slowest_window", "fastest_window")


def first_epoch_columns(first: Prediction | None) -> dict[str, float | None]:
    """Return time and bytes of a step in the first epoch, by column; None if it is like all later ones."""
    return {
        "first_epoch_step_time_s": None if first is None else first.step_time_s,
        "first_epoch_payload_bytes_per_step": None if first is None else first.payload_bytes_per_step,
    }


def columns(
    request: PredictionRequest,
    calibration: Calibration,
    prediction: Prediction | None = None,
    first_epoch: Prediction | None = None,
    *,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Return the values of a request, and of its predictions if given, by the columns of `metrics.csv` and `columns`.

    Columns in `without` are left out. `first_epoch` is the result of `predicted_in_first_epoch`.
    """
    uplink_bps, downlink_bps = (
        min((rate for rate in rates if rate is not None), default=None)
        for rates in zip(*(host.mean_rates for host in request.hosts), strict=True)
    )
    row = {
        "model": calibration.model,
        "dataset": calibration.dataset,
        "optimizer": calibration.optimizer,
        "batch_size": calibration.batch_size,
        "num_parameters": calibration.numel,
        "compressor": request.compressor,
        "collective": request.collective,
        "strategy": request.strategy,
        "trigger": request.trigger,
        "straggler": request.straggler_text,
        "world_size": request.world_size,
        "hosts": len(request.hosts),
        "ranks_per_host": request.ranks_per_host,
        "uplink_bps": uplink_bps,
        "downlink_bps": downlink_bps,
        "link_trace": request.link_trace,
        "latency_s": max(host.latency_s for host in request.hosts),
        "cpu_share": min(host.cpu_share for host in request.hosts),
    }
    if prediction is not None:
        row |= {name: value for name, value in dataclasses.asdict(prediction).items() if name not in OVER_TIME or value}
        row |= {"denser_epochs": denser_epochs(request.compressor), **first_epoch_columns(first_epoch)}
    return {name: value for name, value in row.items() if name not in without}
