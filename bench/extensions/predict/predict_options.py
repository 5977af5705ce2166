"""PredictConfig, the options of `bench predict`: those of `bench run` that a prediction depends on, and a few more."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from typing_extensions import Doc

from bench.core.config.configuration import NOT_GIVEN, Configuration, Flag, syntax
from bench.core.config.job import OUTPUT
from bench.core.config.syntax import Straggler
from bench.core.units import duration
from bench.extensions.predict.losses import Losses
from collectives.options import MOST, Count

WHAT = "What to predict"
RANKS = "Ranks and links"
VALIDATION = "Validation"
# Most ranks that can be simulated when each sends to each, and when several share a host.
MOST_RANKS, MOST_TOGETHER = 16_384, 4096
MOST_CORES = 100_000
Ranks = Annotated[int, Ge(1), Le(MOST_RANKS)]
LinkText = Annotated[str | None, Flag(RANKS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictConfig(Configuration):
    """Compressor, collective, ranks and links to predict; the calibration sets the model, data set and optimizer."""

    panels: ClassVar[tuple[str, ...]] = (WHAT, RANKS, VALIDATION, OUTPUT)

    compressor: Annotated[
        str, Doc("gradient compressor"), Flag(WHAT, kind="compressors", chosen="all that the calibration has, ranked")
    ] = NOT_GIVEN
    collective: Annotated[
        str,
        Doc("how ranks sum gradients"),
        Flag(
            WHAT,
            kind="collectives",
            chosen="the fastest; with more than 64 ranks or with async_server, the one that bench run would choose",
        ),
    ] = NOT_GIVEN
    strategy: Annotated[str, Doc("how ranks train together: ddp or async_server"), Flag(WHAT, kind="strategies")] = (
        "ddp"
    )
    model: Annotated[
        str | None, Doc("network to train; must be that of the calibration"), Flag(WHAT, kind="models")
    ] = None
    dataset: Annotated[
        str | None,
        Doc("data set; must be that of the calibration (without a calibration: digits)"),
        Flag(WHAT, kind="datasets"),
    ] = None
    batch_size: Annotated[
        int | None,
        Ge(1),
        Le(MOST),
        Doc("samples per rank and step; must be those of the calibration (without a calibration: 32)"),
        Flag(WHAT),
    ] = None
    step_time: Annotated[
        str | None,
        Doc("time of a step without exchange, for a rough estimate from --model without a calibration: 50ms"),
        Flag(WHAT),
        syntax(duration),
    ] = None
    trigger: Annotated[
        Literal["async", "sync"],
        Doc("when a bucket is sent; async: as soon as it is ready, sync: once all are ready"),
        Flag(WHAT),
    ] = "async"
    world_size: Annotated[
        Ranks, Doc("ranks of the whole job"), Flag(RANKS, chosen="2, or as many as the hosts have")
    ] = NOT_GIVEN
    hosts: Annotated[Ranks, Doc("machines, each with a link to one switch"), Flag(RANKS, chosen="one per rank")] = (
        NOT_GIVEN
    )
    ranks_per_host: Annotated[Count, Doc("ranks on each host, which share its link and cores"), Flag(RANKS)] = 1
    network: Annotated[LinkText, Doc("a named network: adsl, 4g, wifi, 1gbe or 10gbe")] = None
    bandwidth: Annotated[LinkText, Doc("rate of each host's link in both directions: 100mbit")] = None
    uplink: Annotated[LinkText, Doc("rate at which a host can send: 10mbit")] = None
    downlink: Annotated[LinkText, Doc("rate at which a host can receive: 100mbit")] = None
    bandwidth_trace: Annotated[
        LinkText,
        Doc("file of a rate that varies, both directions; each line is a time in ms at which 1500 bytes may pass"),
    ] = None
    uplink_trace: Annotated[LinkText, Doc("file like --bandwidth-trace, only for what a host sends")] = None
    downlink_trace: Annotated[LinkText, Doc("file like --bandwidth-trace, only for what a host receives")] = None
    latency: Annotated[LinkText, Doc("one-way delay of what a host sends: 5ms")] = None
    cluster_file: Annotated[
        str | None, Doc("TOML file that describes hosts that differ"), Flag(RANKS, name="--cluster")
    ] = None
    straggler: Annotated[
        str | None, Doc("make one rank slow on purpose: rank=1,slowdown=3"), Flag(RANKS), syntax(Straggler.parse)
    ] = None
    losses: Annotated[
        str | None,
        Doc(
            "random failures of hosts: each host's mean time until it fails, the time that a restart takes, and the "
            "steps between checkpoints: every=6h,restart=30s,checkpoint=100"
        ),
        Flag(RANKS),
        syntax(Losses.parse),
    ] = None
    shared_cores: Annotated[
        int | None,
        Ge(1),
        Le(MOST_CORES),
        Doc("cores that all hosts share, as virtual hosts do; by default each has those of the calibrated machine"),
        Flag(RANKS),
    ] = None
