"""From options to what can be predicted, or one sentence that says why it cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

from bench.core import spec
from bench.core.config.configuration import NOT_GIVEN
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.extensions.predict.asynchronous import check_size
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.measurable import cannot_be_calibrated
from bench.extensions.predict.predict_options import MOST_RANKS, MOST_TOGETHER, PredictConfig
from bench.extensions.predict.prediction import check_predictable
from bench.extensions.predict.request import DDP, Asked
from bench.hosts.cluster import HostLink
from bench.hosts.cluster_options import cluster_from_toml, link_of, link_texts
from bench.optimizers.base import Optimizer
from bench.strategies.async_server.async_server import AsyncServer
from bench.strategies.base import Strategy
from collectives.base import Collective
from collectives.options import incompatibility
from compressors.base import Compressor

BASELINE = "bf16"
PREDICTED = (DDP, "async_server")
"""strategies whose steps can be predicted"""


def check(config: PredictConfig, calibration: Calibration) -> Asked:
    """Return what is to be predicted; the collective is the one that a run would choose, where none is named.

    Raises:
        UsageError: something is unknown, illegal together, not calibrated, or says nothing of its rounds.
    """
    return check_asked(calibration, asked_of_options(config))


def asked_of_options(config: PredictConfig) -> Asked:
    """Return what the options say, uncompressed where they name no compressor, and not checked yet.

    Raises:
        UsageError: hosts or links contradict each other, or there are too many ranks.
    """
    hosts, ranks_per_host = _hosts(config)
    most, where = (MOST_RANKS, "") if ranks_per_host == 1 else (MOST_TOGETHER, ", or one on each host")
    if (number := len(hosts) * ranks_per_host) > most:
        raise UsageError(f"{number} ranks are more than can be predicted; choose at most {most}{where}")
    config = config.choose(compressor="none")
    return Asked.of(config, hosts=hosts, ranks_per_host=ranks_per_host, shared_cores=config.shared_cores)


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
    return (link_of(texts),) * number, per_host


def check_asked(calibration: Calibration, asked: Asked) -> Asked:
    """The pair filled in, as it is written shortest.

    Raises:
        UsageError: as `check`.
    """
    if asked.world_size < 2:
        raise UsageError("one rank exchanges nothing; give --world-size 2 or more")
    strategy = _strategy(asked)
    compressor = cast(Compressor, spec.build("compressors", asked.compressor))
    text = spec.short_text(compressor)
    if text not in calibration.encoded:
        if reason := cannot_be_calibrated(compressor):
            raise UsageError(reason)
        raise UsageError(
            f"{text} is not in the calibration, which holds {', '.join(calibration.encoded)}; name it in "
            "bench calibrate --compressors"
        )
    names = [asked.collective] if asked.collective else strategy.default_collectives(compressor)
    components = [cast(Collective, spec.build("collectives", name)) for name in names]
    legal = next((c for c in components if not incompatibility(compressor.check_compatible, c)), components[-1])
    with spec.usage_errors():
        compressor.check_compatible(legal)
        check_predictable(legal)
        legal.check_ranks(asked.world_size)
        if not asked.waits:
            optimizer = cast(Optimizer, spec.build("optimizers", calibration.optimizer))
            strategy.check_compatible(_as_run(asked), compressor, legal, optimizer)
    return dataclasses.replace(
        asked, compressor=text, collective=spec.short_text(legal), strategy=spec.short_text(strategy)
    )


def check_waits(asked: Asked) -> None:
    """Refuse a sweep over steps that ranks do not make together.

    Raises:
        UsageError: the strategy is another than ddp.
    """
    if not asked.waits:
        raise UsageError(f"--sweep compares steps that ranks make together; leave out --strategy {asked.strategy}")


def _as_run(asked: Asked) -> RunConfig:
    """What a strategy looks at in a run before it takes it."""
    return RunConfig(
        collective=asked.collective or NOT_GIVEN,
        world_size=asked.world_size,
        trigger="async" if asked.starts_early else "sync",
        device="cpu",
    )


def _strategy(asked: Asked) -> Strategy:
    """When ranks exchange what, where that can be predicted.

    Raises:
        UsageError: it cannot, among these ranks or on these links.
    """
    strategy = cast(Strategy, spec.build("strategies", asked.strategy))
    if strategy.component_name not in PREDICTED:
        raise UsageError(f"steps of {strategy.component_name} cannot be predicted; choose {' or '.join(PREDICTED)}")
    if isinstance(strategy, AsyncServer):
        check_size(asked.world_size)
    if asked.straggler is not None:
        asked.straggler.check_among(asked.world_size)
    if not asked.waits and any(host.uplink_trace or host.downlink_trace for host in asked.hosts):
        raise UsageError(
            f"a rate that changes over time cannot be predicted with {strategy.component_name}; give the hosts a "
            "constant one"
        )
    return strategy
