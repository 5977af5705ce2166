"""What `bench predict` is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Self

from bench.core.config.run import RunConfig
from bench.core.config.syntax import Straggler
from bench.core.errors import UsageError
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.predict_options import PredictConfig
from bench.hosts.cluster import HostLink

DDP = "ddp"


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

    @classmethod
    def of(
        cls,
        config: PredictConfig | RunConfig,
        *,
        hosts: tuple[HostLink, ...],
        ranks_per_host: int,
        shared_cores: int | None,
    ) -> Self:
        """What the options say that a prediction and a run have in common, not checked yet."""
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
        """Whether ranks make their steps together."""
        return waits(self.strategy)

    @property
    def trigger(self) -> str:
        """As in `metrics.csv`."""
        return "async" if self.starts_early else "sync"

    @property
    def straggler_text(self) -> str | None:
        """As in `metrics.csv`."""
        return None if self.straggler is None else str(self.straggler)

    @property
    def slowest_bps(self) -> float | None:
        """The slowest rate of any link, of a trace its mean; None: not limited."""
        return _slowest(rate for host in self.hosts for rate in host.mean_rates)

    @property
    def uplink_bps(self) -> float | None:
        """The slowest rate at which a host sends, likewise."""
        return _slowest(host.mean_rates[0] for host in self.hosts)

    @property
    def downlink_bps(self) -> float | None:
        """The slowest rate at which a host receives, likewise."""
        return _slowest(host.mean_rates[1] for host in self.hosts)

    @property
    def link_trace(self) -> str | None:
        """The traces that links follow, as in `metrics.csv`."""
        return ", ".join(dict.fromkeys(trace.label for host in self.hosts for trace in host.traces if trace)) or None

    @property
    def world_size(self) -> int:
        """All ranks."""
        return len(self.hosts) * self.ranks_per_host

    def load(self, calibration: Calibration) -> float:
        """Threads that compute at once / cores that they share."""
        if self.shared_cores is None:
            return self.ranks_per_host * calibration.threads / calibration.cores
        return self.world_size * calibration.threads / self.shared_cores

    def at_rate(self, bandwidth_bps: float) -> Asked:
        """The same over links of one rate, up and down.

        Raises:
            UsageError: the hosts' links have rates of their own, or follow a trace.
        """
        if self.link_trace:
            raise UsageError("--sweep sets the rate of all links, which is then constant; leave out the trace")
        if any(rate is not None for host in self.hosts for rate in (host.uplink_bps, host.downlink_bps)):
            raise UsageError("--sweep sets the rate of all links; take those of the hosts out of the cluster file")
        hosts = [dataclasses.replace(host, uplink_bps=bandwidth_bps, downlink_bps=bandwidth_bps) for host in self.hosts]
        return dataclasses.replace(self, hosts=tuple(hosts))


def waits(strategy: str) -> bool:
    """Whether ranks of this strategy make their steps together."""
    return strategy.partition(":")[0] == DDP


def _slowest(rates: Iterable[float | None]) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)
