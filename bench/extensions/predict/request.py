"""Requests for predictions: built from the options of `bench predict` or from a run, and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Self, cast

from bench.core import spec
from bench.core.config.configuration import NOT_GIVEN
from bench.core.config.run import RunConfig
from bench.core.config.syntax import Straggler
from bench.core.errors import UsageError
from bench.extensions.predict.asynchronous import check_size
from bench.extensions.predict.calibrating import cannot_be_calibrated
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.options import MOST_RANKS, MOST_TOGETHER, PredictConfig
from bench.extensions.predict.prediction import check_predictable
from bench.hosts.cluster import HostLink
from bench.hosts.cluster_options import cluster_from_toml, link_of, link_texts
from bench.optimizers.base import Optimizer
from bench.strategies.async_server import AsyncServer
from bench.strategies.base import Strategy
from collectives.base import Collective
from collectives.options import incompatibility
from compressors.base import Compressor

DDP = "ddp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """A request for a prediction.

    Attributes:
        compressor, collective, strategy: spec texts, in their shortest form once the request is checked.
        hosts: the link of each host.
        shared_cores: number of cores that all hosts share; None if each host has those of the calibrated machine.
        starts_early: True if a bucket is sent as soon as it is ready (trigger async).
        straggler: a rank that is slowed down on purpose, or None.
    """

    compressor: str
    collective: str
    hosts: tuple[HostLink, ...]
    ranks_per_host: int
    shared_cores: int | None
    starts_early: bool
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
        """Return a request from the options that predictions and runs share, without checking it."""
        return cls(
            compressor=config.compressor,
            collective=config.collective,
            hosts=hosts,
            ranks_per_host=ranks_per_host,
            shared_cores=shared_cores,
            starts_early=config.trigger == "async",
            strategy=config.strategy,
            straggler=Straggler.parse(config.straggler) if config.straggler else None,
        )

    @property
    def waits(self) -> bool:
        """Return whether ranks wait for each other in every step."""
        return waits(self.strategy)

    @property
    def trigger(self) -> str:
        """Return the trigger as in `metrics.csv`."""
        return "async" if self.starts_early else "sync"

    @property
    def straggler_text(self) -> str | None:
        """Return the straggler as in `metrics.csv`."""
        return None if self.straggler is None else str(self.straggler)

    @property
    def slowest_bps(self) -> float | None:
        """Return the slowest rate of any link in bits per second; None if no link is limited.

        The mean rate counts for a link that follows a trace.
        """
        return slowest(rate for host in self.hosts for rate in host.mean_rates)

    @property
    def link_trace(self) -> str | None:
        """Return the traces that links follow, as in `metrics.csv`."""
        return ", ".join(dict.fromkeys(trace.label for host in self.hosts for trace in host.traces if trace)) or None

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.hosts) * self.ranks_per_host

    def load(self, calibration: Calibration) -> float:
        """Return the number of computing threads / the number of cores that they share."""
        if self.shared_cores is None:
            return self.ranks_per_host * calibration.threads / calibration.cores
        return self.world_size * calibration.threads / self.shared_cores

    def at_rate(self, bandwidth_bps: float) -> PredictionRequest:
        """Return the same request with this rate of all links in both directions.

        Raises:
            UsageError: links of hosts already have rates, or follow a trace.
        """
        if self.link_trace:
            raise UsageError("--sweep sets the rate of all links, which is then constant; leave out the trace")
        if any(rate is not None for host in self.hosts for rate in (host.uplink_bps, host.downlink_bps)):
            raise UsageError("--sweep sets the rate of all links; remove the rates of the hosts from the cluster file")
        hosts = [dataclasses.replace(host, uplink_bps=bandwidth_bps, downlink_bps=bandwidth_bps) for host in self.hosts]
        return dataclasses.replace(self, hosts=tuple(hosts))


def waits(strategy: str) -> bool:
    """Return whether ranks wait for each other in every step of this strategy."""
    return strategy.partition(":")[0] == DDP


def slowest(rates: Iterable[float | None]) -> float | None:
    """Return the slowest of the rates; None if no rate is limited."""
    return min((rate for rate in rates if rate is not None), default=None)


BASELINE = "bf16"
# Strategies whose steps can be predicted.
PREDICTED = (DDP, "async_server")


def check(config: PredictConfig, calibration: Calibration) -> PredictionRequest:
    """Return the checked request of the options; without a named collective, it has the one that a run would choose.

    Raises:
        UsageError: a component is unknown or not calibrated, the components are incompatible, or the collective does
            not describe its rounds.
    """
    return check_request(calibration, request_from_options(config))


def request_from_options(config: PredictConfig) -> PredictionRequest:
    """Return the unchecked request of the options; it is uncompressed if they name no compressor.

    Raises:
        UsageError: options of hosts or links contradict each other, or there are too many ranks.
    """
    hosts, ranks_per_host = _hosts(config)
    most, where = (MOST_RANKS, "") if ranks_per_host == 1 else (MOST_TOGETHER, ", or one rank per host")
    if (number := len(hosts) * ranks_per_host) > most:
        raise UsageError(f"{number} ranks are more than can be predicted; choose at most {most}{where}")
    config = config.choose(compressor="none")
    return PredictionRequest.of(config, hosts=hosts, ranks_per_host=ranks_per_host, shared_cores=config.shared_cores)


def _hosts(config: PredictConfig) -> tuple[tuple[HostLink, ...], int]:
    """Return each host's link, and the number of ranks on each host."""
    texts = link_texts(config)
    if config.cluster_file is not None:
        named = [f"--{key}" for key in texts] + [f"--{key}" for key in ("hosts", "world_size") if getattr(config, key)]
        if named or config.ranks_per_host > 1:
            other = (*named, "--ranks-per-host")[0].replace("_", "-")
            raise UsageError(f"--cluster and {other} both describe the hosts; describe them in the file only")
        cluster = cluster_from_toml(Path(config.cluster_file))
        return cluster.hosts, cluster.ranks_per_host
    per_host = config.ranks_per_host
    number = config.hosts or max(1, (config.world_size or 2) // per_host)
    if config.world_size not in (None, number * per_host):
        raise UsageError(
            f"--world-size {config.world_size} is not {number} hosts with {per_host} rank(s) each; leave out one"
        )
    return (link_of(texts),) * number, per_host


def check_request(calibration: Calibration, request: PredictionRequest) -> PredictionRequest:
    """Return the request with compressor, collective and strategy filled in, in their shortest form.

    Raises:
        UsageError: see `check`.
    """
    if request.world_size < 2:
        raise UsageError("one rank exchanges nothing; give --world-size 2 or more")
    strategy = _strategy(request)
    compressor = cast(Compressor, spec.build("compressors", request.compressor))
    text = spec.short_text(compressor)
    if text not in calibration.encoded:
        if reason := cannot_be_calibrated(compressor):
            raise UsageError(reason)
        raise UsageError(
            f"{text} is not in the calibration, which holds {', '.join(calibration.encoded)}; name it in "
            "bench calibrate --compressors"
        )
    defaults = strategy.default_collectives or compressor.default_collectives
    names = [request.collective] if request.collective else defaults
    components = [cast(Collective, spec.build("collectives", name)) for name in names]
    legal = next((c for c in components if not incompatibility(compressor.check_compatible, c)), components[-1])
    with spec.usage_errors():
        compressor.check_compatible(legal)
        check_predictable(legal)
        legal.check_ranks(request.world_size)
        if not request.waits:
            optimizer = cast(Optimizer, spec.build("optimizers", calibration.optimizer))
            strategy.check_compatible(_as_run(request), compressor, legal, optimizer)
    return dataclasses.replace(
        request, compressor=text, collective=spec.short_text(legal), strategy=spec.short_text(strategy)
    )


def check_waits(request: PredictionRequest) -> None:
    """Refuse a sweep with a strategy that does not synchronize ranks in every step.

    Raises:
        UsageError: the strategy is not ddp.
    """
    if not request.waits:
        raise UsageError(
            f"--sweep needs ranks that wait for each other in every step; leave out --strategy {request.strategy}"
        )


def _as_run(request: PredictionRequest) -> RunConfig:
    """Return a run with the options that `Strategy.check_compatible` reads."""
    return RunConfig(
        collective=request.collective or NOT_GIVEN,
        world_size=request.world_size,
        trigger="async" if request.starts_early else "sync",
        device="cpu",
    )


def _strategy(request: PredictionRequest) -> Strategy:
    """Return the request's strategy.

    Raises:
        UsageError: its steps cannot be predicted with these ranks or on these links.
    """
    strategy = cast(Strategy, spec.build("strategies", request.strategy))
    if strategy.component_name not in PREDICTED:
        raise UsageError(f"steps of {strategy.component_name} cannot be predicted; choose {' or '.join(PREDICTED)}")
    if isinstance(strategy, AsyncServer):
        check_size(request.world_size)
    if request.straggler is not None:
        request.straggler.check_among(request.world_size)
    if not request.waits and any(host.uplink_trace or host.downlink_trace for host in request.hosts):
        raise UsageError(
            f"a rate that changes over time cannot be predicted with {strategy.component_name}; give the hosts a "
            "constant one"
        )
    return strategy
