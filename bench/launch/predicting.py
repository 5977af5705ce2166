"""`bench predict`: from options and a calibration to predicted steps, and curves over the bandwidth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from bench.core import environment, spec
from bench.core.config import RunConfig
from bench.core.configuration import NOT_GIVEN
from bench.core.errors import UsageError
from bench.core.interface import FRAME_BYTES, FRAME_HEADER_BYTES
from bench.core.parts import FORWARDED, FRAMES, LOCAL, SEGMENTS, Calibration
from bench.core.predict_config import PredictConfig
from bench.core.straggler import Straggler
from bench.core.units import format_rate, format_seconds, parse_rate
from bench.costs.arrays import Floats
from bench.costs.asynchronous import predict_async
from bench.costs.links import Links
from bench.costs.paces import Pace
from bench.costs.prediction import Prediction, Setting, predict, refusal
from bench.costs.simulated_server import AsyncSetting
from bench.hosts.cluster import HostLink, has_real_frames
from bench.hosts.cluster_options import cluster_from_toml, link_of, link_texts
from bench.hosts.trace import Trace
from bench.optimizers.base import Optimizer
from bench.strategies.async_server import AsyncServer
from bench.strategies.base import Strategy
from collectives.base import Collective
from compressors.base import Compressor

BASELINE = "bf16"
DDP = "ddp"
PREDICTED = (DDP, "async_server")
"""strategies whose steps can be predicted"""
FRAME_PER_PAYLOAD = FRAME_BYTES / (FRAME_BYTES - FRAME_HEADER_BYTES)
"""bytes of a full Ethernet frame / what TCP carries in it, with timestamps"""
ACK_SHARE = FRAME_HEADER_BYTES / (2 * FRAME_BYTES)
"""of an acknowledgement, a header without payload, for every second frame: RFC 1122, section 4.2.3.2"""
POINTS_PER_DECADE = 6
MS_PER_S = 1e3
OVER_TIME = ("step_time_p95_s", "slowest_window", "fastest_window")
"""what is predicted only where a rate changes over time, the windows only where steps are shorter than the trace"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be predicted, checked.

    Attributes:
        hosts: each one's link.
        strategy: when ranks exchange what, as it is written shortest.
        straggler: a rank that is slow on purpose.
    """

    compressor: str
    collective: str
    hosts: tuple[HostLink, ...]
    ranks_per_host: int
    shared_cores: int | None
    starts_early: bool
    strategy: str = DDP
    straggler: Straggler | None = None

    @property
    def waits(self) -> bool:
        """Whether ranks make their steps together."""
        return waits(self.strategy)

    @property
    def straggler_text(self) -> str | None:
        """As in `metrics.csv`."""
        return None if self.straggler is None else str(self.straggler)

    @property
    def slowest_bps(self) -> float | None:
        """The slowest rate of any link, of a trace its mean; None: not limited."""
        return _slowest([rate for host in self.hosts for rate in host.mean_rates])

    @property
    def link_trace(self) -> str | None:
        """The traces that links follow, as in `metrics.csv`."""
        return ", ".join(dict.fromkeys(trace.label for host in self.hosts for trace in host.traces if trace)) or None

    @property
    def world_size(self) -> int:
        """All ranks."""
        return len(self.hosts) * self.ranks_per_host

    def way(self, calibration: Calibration) -> str:
        """How messages go: as between virtual hosts where those share cores, else over links of frames.

        Virtual hosts have late frames, where that was measured, and those of traces forwarded.
        """
        if self.shared_cores is None or len(self.hosts) == 1:
            return LOCAL
        if FORWARDED in calibration.messages and (self.link_trace or any(host.latency_s for host in self.hosts)):
            return FORWARDED
        return FRAMES if self.link_trace or has_real_frames(self.hosts) else SEGMENTS

    def at_rate(self, bandwidth_bps: float) -> Asked:
        """The same over links of one rate, up and down.

        Raises:
            UsageError: the hosts' links follow a trace.
        """
        if self.link_trace:
            raise UsageError("--sweep sets the rate of all links, which is then constant; leave out the trace")
        hosts = [dataclasses.replace(host, uplink_bps=bandwidth_bps, downlink_bps=bandwidth_bps) for host in self.hosts]
        return dataclasses.replace(self, hosts=tuple(hosts))


def waits(strategy: str) -> bool:
    """Whether ranks of this strategy make their steps together."""
    return strategy.partition(":")[0] == DDP


def check(config: PredictConfig, calibration: Calibration) -> Asked:
    """Refuse what cannot be predicted.

    Raises:
        UsageError: something is unknown, illegal together, not calibrated, or says nothing of its rounds.
    """
    hosts, ranks_per_host = _hosts(config)
    return check_asked(
        calibration,
        Asked(
            compressor=config.compressor,
            collective=config.collective,
            hosts=hosts,
            ranks_per_host=ranks_per_host,
            shared_cores=config.shared_cores,
            starts_early=config.trigger == "async",
            strategy=config.strategy,
            straggler=Straggler.parse(config.straggler) if config.straggler else None,
        ),
    )


def baseline(asked: Asked, calibration: Calibration) -> Asked:
    """Dense gradients in 16 bits on the same links, summed as they would be without a choice.

    Raises:
        UsageError: they are not calibrated.
    """
    return check_asked(calibration, dataclasses.replace(asked, compressor=BASELINE, collective=""))


def check_asked(calibration: Calibration, asked: Asked) -> Asked:
    """The pair filled in, as it is written shortest.

    Raises:
        UsageError: as `check`.
    """
    strategy = _strategy(asked)
    compressor = cast(Compressor, spec.build("compressors", asked.compressor))
    text = spec.short_text(compressor)
    if text not in calibration.encoded:
        raise UsageError(
            f"{text} is not in the calibration, which holds {', '.join(calibration.encoded)}; name it in "
            "bench calibrate --compressors"
        )
    names = [asked.collective] if asked.collective else strategy.default_collectives(compressor)
    components = [cast(Collective, spec.build("collectives", name)) for name in names]
    legal = next((c for c in components if compressor.refusal(c) is None), components[-1])
    reason = compressor.refusal(legal) or refusal(legal) or legal.ranks_refusal(asked.world_size)
    reason = reason or strategy.refusal(
        RunConfig(
            collective=asked.collective or NOT_GIVEN,
            world_size=asked.world_size,
            trigger="async" if asked.starts_early else "sync",
            device="cpu",
        ),
        compressor,
        legal,
        cast(Optimizer, spec.build("optimizers", calibration.optimizer)),
    )
    if reason:
        raise UsageError(reason)
    return dataclasses.replace(
        asked, compressor=text, collective=spec.short_text(legal), strategy=spec.short_text(strategy)
    )


def _strategy(asked: Asked) -> Strategy:
    """When ranks exchange what, where that can be predicted.

    Raises:
        UsageError: it cannot, among these ranks or on these links.
    """
    strategy = cast(Strategy, spec.build("strategies", asked.strategy))
    if strategy.component_name not in PREDICTED:
        raise UsageError(f"steps of {strategy.component_name} cannot be predicted; choose {' or '.join(PREDICTED)}")
    if asked.straggler is not None:
        asked.straggler.check_among(asked.world_size)
    if not asked.waits and any(host.uplink_trace or host.downlink_trace for host in asked.hosts):
        raise UsageError(
            f"a rate that changes over time cannot be predicted with {strategy.component_name}; give the hosts a "
            "constant one"
        )
    return strategy


def _hosts(config: PredictConfig) -> tuple[tuple[HostLink, ...], int]:
    """(each host's link, ranks on each)."""
    texts = link_texts(config)
    if config.cluster_file is not None:
        named = [f"--{key}" for key in texts] + [f"--{key}" for key in ("hosts", "world_size") if getattr(config, key)]
        if named or config.ranks_per_host > 1:
            other = (*named, "--ranks-per-host")[0].replace("_", "-")
            raise UsageError(f"--cluster and {other} both describe the hosts; put all of it into the file")
        cluster = cluster_from_toml(Path(config.cluster_file))
        return cluster.hosts, cluster.ranks_per_host
    per_host = config.ranks_per_host
    number = config.hosts or max(1, (config.world_size or 2) // per_host)
    if config.world_size not in (None, number * per_host):
        raise UsageError(
            f"--world-size {config.world_size} is not {number} hosts with {per_host} rank(s) each; leave out one"
        )
    if number * per_host < 2:
        raise UsageError("one rank exchanges nothing; give --world-size 2 or more")
    return (link_of(texts),) * number, per_host


def predicted(calibration: Calibration, asked: Asked) -> Prediction:
    """A step of what was asked for.

    Raises:
        UsageError: it is more than can be simulated.
    """
    if not asked.waits:
        return _predicted_async(calibration, asked)
    collective = cast(Collective, spec.build("collectives", asked.collective))
    encoded = calibration.encoded[asked.compressor]
    plain = asked.compressor == "none" and asked.collective == "native" and asked.starts_early
    if plain:  # DDP by itself
        encoded = tuple(dataclasses.replace(bucket, work_s=(0.0,) * len(bucket.work_s)) for bucket in encoded)
    return predict(
        calibration,
        Setting(
            collective=collective,
            encoded=encoded,
            links=_links(calibration, asked),
            slower=_slower(asked),
            load=_load(calibration, asked),
            shared_cores=asked.shared_cores,
            straggler=asked.straggler,
            in_hook=not plain,
            starts_early=asked.starts_early,
        ),
    )


def _predicted_async(calibration: Calibration, asked: Asked) -> Prediction:
    return predict_async(
        calibration,
        AsyncSetting(
            strategy=cast(AsyncServer, spec.build("strategies", asked.strategy)),
            encoded=calibration.encoded[asked.compressor],
            links=_links(calibration, asked),
            slower=_slower(asked),
            load=_load(calibration, asked),
            shared_cores=asked.shared_cores,
            straggler=asked.straggler,
        ),
    )


def _slower(asked: Asked) -> Floats:
    """By which factor each rank computes more slowly, for its host."""
    return np.repeat([1 / host.cpu_share for host in asked.hosts], asked.ranks_per_host)


def _load(calibration: Calibration, asked: Asked) -> float:
    """Threads that compute at once / cores that they share."""
    if asked.shared_cores is None:
        return asked.ranks_per_host * calibration.threads / calibration.cores
    return asked.world_size * calibration.threads / asked.shared_cores


def _links(calibration: Calibration, asked: Asked) -> Links:
    way = asked.way(calibration)
    framed, acked = (1.0, 0.0) if way == SEGMENTS else (FRAME_PER_PAYLOAD, ACK_SHARE)
    costs = calibration.messages.get(way, calibration.messages[LOCAL])

    def rates(figures: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([math.inf if bps is None else bps / 8 / framed for bps in figures])

    return Links(
        host_of=np.repeat(np.arange(len(asked.hosts)), asked.ranks_per_host),
        up_rate=rates([host.mean_rates[0] for host in asked.hosts]),
        down_rate=rates([host.mean_rates[1] for host in asked.hosts]),
        up_paces=_paces([host.uplink_trace for host in asked.hosts]),
        down_paces=_paces([host.downlink_trace for host in asked.hosts]),
        latency_s=np.array([host.latency_s for host in asked.hosts]),
        ack_share=acked,
        message_s=costs.message_s,
        byte_s=costs.byte_s,
        wake_s=costs.wake_s,
        carry_byte_s=costs.carry_byte_s / (asked.shared_cores or 1),
    )


def _paces(traces: Sequence[Trace | None]) -> list[Pace | None]:
    """Each trace is read once.

    Raises:
        UsageError: a file is gone, or another one.
    """
    read = {trace: Pace(np.array(trace.opportunities()) / MS_PER_S) for trace in dict.fromkeys(traces) if trace}
    return [None if trace is None else read[trace] for trace in traces]


def columns(asked: Asked, prediction: Prediction, calibration: Calibration) -> dict[str, Any]:
    """A prediction under the names of the columns of `metrics.csv`."""
    return {
        "model": calibration.model,
        "dataset": calibration.dataset,
        "optimizer": calibration.optimizer,
        "batch_size": calibration.batch_size,
        "compressor": asked.compressor,
        "collective": asked.collective,
        "strategy": asked.strategy,
        "straggler": asked.straggler_text,
        "world_size": asked.world_size,
        "hosts": len(asked.hosts),
        "ranks_per_host": asked.ranks_per_host,
        "uplink_bps": _slowest([host.mean_rates[0] for host in asked.hosts]),
        "downlink_bps": _slowest([host.mean_rates[1] for host in asked.hosts]),
        "link_trace": asked.link_trace,
        "latency_s": max(host.latency_s for host in asked.hosts),
        "cpu_share": min(host.cpu_share for host in asked.hosts),
        **{name: value for name, value in dataclasses.asdict(prediction).items() if name not in OVER_TIME or value},
    }


def _slowest(rates: Sequence[float | None]) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)


def notes(calibration: Calibration, asked: Asked, *, range_too: bool = True) -> list[str]:
    """What a user should know before trusting a prediction, one sentence each; `range_too`: also what was validated."""
    said = []
    if (calibration.cpu, calibration.cores) != (environment.cpu_model(), environment.usable_cores()):
        said.append(
            f"calibrated on {calibration.cpu} ({calibration.cores} cores), which this machine is not: that one is what "
            "is predicted"
        )
    if any(host.jitter_s or host.loss for host in asked.hosts):
        said.append("jitter and loss are not part of the model, and left out")
    if range_too and (reason := outside(calibration, asked)):
        said.append(f"outside the validated range: {reason}")
    return said


def outside(calibration: Calibration, asked: Asked) -> str | None:
    """Why a prediction is further than any that was held against a measurement; None where it is not."""
    if not calibration.validated:
        return "nothing that this calibration predicts was measured yet; see bench predict --validate"
    as_asked = asked.strategy, asked.straggler_text
    checked = [cell for cell in calibration.validated if (cell.strategy, cell.straggler) == as_asked]
    if not checked:
        beside = "without a straggler" if asked.straggler is None else f"with the straggler {asked.straggler}"
        return f"{asked.strategy} {beside} was not measured"
    checked = [cell for cell in checked if cell.link_trace == asked.link_trace]
    if not checked:
        return f"links that follow {asked.link_trace or 'no trace'} were not measured"
    name = asked.collective.partition(":")[0]
    if (asked.compressor, name) not in {(cell.compressor, cell.collective.partition(":")[0]) for cell in checked}:
        return f"{asked.compressor} on {name} was not measured"
    sizes = [cell.world_size for cell in checked]
    if not min(sizes) <= asked.world_size <= max(sizes):
        return f"{asked.world_size} ranks; {min(sizes)} to {max(sizes)} were measured"
    rates = [cell.bandwidth_bps or math.inf for cell in checked]
    rate = asked.slowest_bps or math.inf
    if not min(rates) <= rate <= max(rates):
        said = "links that are not limited" if math.isinf(rate) else format_rate(rate)
        return f"{said}; {format_rate(min(rates))} to {format_rate(max(rates))} were measured"
    latency = max(host.latency_s for host in asked.hosts)
    if latency > max(cell.latency_s for cell in checked):
        return f"a latency of {format_seconds(latency)}, longer than any that was measured"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Steps over the rate of all links.

    Attributes:
        rates_bps: ascending.
        pair, dense: step times of what was asked for, and of dense gradients in 16 bits.
        break_even_bps: rates at which both are equal, by interpolation.
    """

    rates_bps: list[float]
    pair: list[Prediction]
    dense: list[Prediction]
    break_even_bps: list[float]

    @property
    def pays(self) -> list[bool]:
        """Where the pair is faster."""
        return [a.step_time_s < b.step_time_s for a, b in zip(self.pair, self.dense, strict=True)]


def sweep(calibration: Calibration, asked: Asked, rates_bps: Sequence[float]) -> Curve:
    """Predict at every rate.

    Raises:
        UsageError: dense gradients in 16 bits are not calibrated, or ranks do not make their steps together.
    """
    if not asked.waits:
        raise UsageError(f"--sweep compares steps that ranks make together; leave out --strategy {asked.strategy}")
    other = baseline(asked, calibration)
    pair = [predicted(calibration, asked.at_rate(rate)) for rate in rates_bps]
    dense = [predicted(calibration, other.at_rate(rate)) for rate in rates_bps]
    ratios = np.log([a.step_time_s / b.step_time_s for a, b in zip(pair, dense, strict=True)])
    logs = np.log(rates_bps)
    crossings = np.flatnonzero((ratios[:-1] < 0) != (ratios[1:] < 0))
    at = [logs[i] + (logs[i + 1] - logs[i]) * ratios[i] / (ratios[i] - ratios[i + 1]) for i in crossings]
    return Curve(rates_bps=list(rates_bps), pair=pair, dense=dense, break_even_bps=np.exp(at).tolist())


def parse_sweep(text: str, per_decade: int = POINTS_PER_DECADE) -> list[float]:
    """``bandwidth=1mbit..10gbit`` -> rates in bits per second, evenly on a logarithmic scale.

    Raises:
        UsageError: it is not of that form.
    """
    name, _, ends = text.partition("=")
    first, dots, last = ends.partition("..")
    if name.strip() != "bandwidth" or not dots:
        raise UsageError(f"--sweep '{text}' is not possible; write it like bandwidth=1mbit..10gbit")
    low, high = parse_rate(first.strip()), parse_rate(last.strip())
    if not low < high:
        raise UsageError(f"--sweep '{text}' does not ascend; write the slower rate first")
    points = max(2, round(per_decade * math.log10(high / low)) + 1)
    return [float(rate) for rate in np.geomspace(low, high, points)]
