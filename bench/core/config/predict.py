"""PredictConfig: what `bench predict` is asked for; the options of `bench run` that a prediction depends on."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le
from typing_extensions import Doc

from bench.core.config.configuration import NOT_GIVEN, Configuration, Flag, Form
from bench.core.config.job import OUTPUT
from bench.core.config.losses import Losses
from bench.core.config.straggler import Straggler
from bench.core.units import duration
from collectives.options import MOST, Count

WHAT = "What to predict"
RANKS = "Ranks and links"
VALIDATION = "Validation"
MOST_RANKS, MOST_TOGETHER = 16_384, 4096
"""that can be simulated, each of which sends to each; where several share a host"""
MOST_CORES = 100_000
Ranks = Annotated[int, Ge(1), Le(MOST_RANKS)]
LinkText = Annotated[str | None, Flag(RANKS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictConfig(Configuration):
    """A pair, ranks and links; model, data set, batch and optimizer are those of the calibration."""

    panels: ClassVar[tuple[str, ...]] = (WHAT, RANKS, VALIDATION, OUTPUT)

    compressor: Annotated[
        str, Doc("gradient compressor"), Flag(WHAT, room="compressors", chosen="all of the calibration, ranked")
    ] = NOT_GIVEN
    collective: Annotated[
        str,
        Doc("how ranks sum"),
        Flag(
            WHAT,
            room="collectives",
            chosen="the fastest; among more than 64 ranks, and with async_server, the one that a run would choose",
        ),
    ] = NOT_GIVEN
    strategy: Annotated[str, Doc("when ranks exchange what: ddp or async_server"), Flag(WHAT, room="strategies")] = (
        "ddp"
    )
    model: Annotated[
        str | None, Doc("network that is trained; a calibration must be of it"), Flag(WHAT, room="models")
    ] = None
    dataset: Annotated[str | None, Doc("data set, likewise; digits in an estimate"), Flag(WHAT, room="datasets")] = None
    batch_size: Annotated[
        int | None, Ge(1), Le(MOST), Doc("samples per rank and step, likewise; 32 in an estimate"), Flag(WHAT)
    ] = None
    step_time: Annotated[
        str | None,
        Doc("time of a step without exchange: a rough estimate from the shapes of --model, without a calibration"),
        Flag(WHAT),
        Form(duration),
    ] = None
    trigger: Annotated[
        Literal["async", "sync"],
        Doc("when a bucket is sent; async: when it is ready, sync: when all are"),
        Flag(WHAT),
    ] = "async"
    world_size: Annotated[Ranks, Doc("ranks of the whole job"), Flag(RANKS, chosen="2, or those of the hosts")] = (
        NOT_GIVEN
    )
    hosts: Annotated[Ranks, Doc("machines, each with a link to one switch"), Flag(RANKS, chosen="one per rank")] = (
        NOT_GIVEN
    )
    ranks_per_host: Annotated[Count, Doc("ranks on each host, which share its link and cores"), Flag(RANKS)] = 1
    network: Annotated[LinkText, Doc("a named network: adsl, 4g, wifi, 1gbe or 10gbe")] = None
    bandwidth: Annotated[LinkText, Doc("rate of each link, up and down: 100mbit")] = None
    uplink: Annotated[LinkText, Doc("rate of what a host sends")] = None
    downlink: Annotated[LinkText, Doc("rate of what a host receives")] = None
    bandwidth_trace: Annotated[
        LinkText, Doc("file of the rate over time, up and down: a line for each millisecond at which 1500 bytes pass")
    ] = None
    uplink_trace: Annotated[LinkText, Doc("such a file for what a host sends")] = None
    downlink_trace: Annotated[LinkText, Doc("such a file for what a host receives")] = None
    latency: Annotated[LinkText, Doc("one-way delay of what a host sends: 5ms")] = None
    cluster_file: Annotated[
        str | None, Doc("a TOML file that describes uneven hosts"), Flag(RANKS, name="--cluster")
    ] = None
    straggler: Annotated[
        str | None, Doc("a rank that is slow on purpose: rank=1,slowdown=3"), Flag(RANKS), Form(Straggler.parse)
    ] = None
    losses: Annotated[
        str | None,
        Doc(
            "hosts that are lost, each once in so long on average, the time until the job has begun anew, and the "
            "steps between its checkpoints: every=6h,restart=30s,checkpoint=100"
        ),
        Flag(RANKS),
        Form(Losses.parse),
    ] = None
    shared_cores: Annotated[
        int | None,
        Ge(1),
        Le(MOST_CORES),
        Doc("cores that all hosts share, as virtual ones do; without it each has those of the calibrated machine"),
        Flag(RANKS),
    ] = None
