"""What every job is told, whatever it measures: `JobConfig`; and where its ranks run: `RanksConfig`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt
from typing_extensions import Doc

from bench.core.config.configuration import NOT_GIVEN, NOT_RECORDED, Configuration, Flag, Form, Recorded
from bench.core.config.endpoint import Endpoint

MEASUREMENT = "Measurement"
PROCESSES = "Processes"
MACHINES = "Several machines"
VIRTUAL_HOSTS = "Virtual hosts"
OUTPUT = "Output"

DEFAULT_WORLD_SIZE = 2
MAX_RANKS = 4096
# What tells one run's random numbers from another's are 32 bits.
MAX_SEED = 2**32 - 1
# Ten days: polls count milliseconds in 31 bits.
MAX_TIMEOUT_S = 864_000

RankCount = Annotated[int, Ge(1), Le(MAX_RANKS)]

Threads = Annotated[int, Ge(1), Le(1024), Doc("threads per rank for tensor operations")]
BucketMb = Annotated[float, Ge(0.001), Le(1e6), Doc("DDP's bucket size in MiB"), Recorded(unit="MiB")]
DataDir = Annotated[str, Doc("where data sets lie"), NOT_RECORDED]
DATA_DIR = "data"
LinkWord = Annotated[str | None, Flag(VIRTUAL_HOSTS), NOT_RECORDED]
"""What a user writes of links; the figures that come of it are recorded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig(Configuration):
    """A job of one process or more."""

    seed: Annotated[int, Ge(0), Le(MAX_SEED), Doc("seed of everything random"), Flag(MEASUREMENT)] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Doc("where tensors lie; auto: cuda where torch sees enough"), Flag(PROCESSES)
    ] = "auto"
    timeout_s: Annotated[
        float,
        Ge(1),
        Le(MAX_TIMEOUT_S),
        Doc("seconds that one step (or sum, or turn) may take; then ranks find out who is late, and the job ends"),
        Flag(PROCESSES, name="--timeout"),
        NOT_RECORDED,
    ] = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanksConfig(JobConfig):
    """A job of several ranks: how many, on which machines or virtual hosts, with which links."""

    world_size: Annotated[
        RankCount,
        Doc("ranks of the whole job"),
        Flag(PROCESSES, chosen=f"{DEFAULT_WORLD_SIZE}, or those of the virtual hosts"),
    ] = NOT_GIVEN
    threads: Annotated[Threads, Flag(PROCESSES, chosen="cores / ranks")] = NOT_GIVEN
    nnodes: Annotated[RankCount, Doc("machines; give the same command on each"), Flag(MACHINES), NOT_RECORDED] = 1
    node_rank: Annotated[int, Ge(0), Lt(MAX_RANKS), Doc("this machine, from 0"), Flag(MACHINES), NOT_RECORDED] = 0
    rdzv_endpoint: Annotated[
        str | None, Doc("HOST:PORT of machine 0"), Flag(MACHINES), NOT_RECORDED, Form(Endpoint.parse)
    ] = None
    hosts: Annotated[
        int | None,
        Ge(1),
        Le(MAX_RANKS),
        Doc("virtual hosts on this machine; in rows without them, machines"),
        Flag(VIRTUAL_HOSTS),
    ] = None
    ranks_per_host: Annotated[
        RankCount, Doc("ranks on each host"), Flag(VIRTUAL_HOSTS, chosen="1 on a virtual host")
    ] = NOT_GIVEN
    network: Annotated[LinkWord, Doc("a named network: adsl, 4g, wifi, 1gbe or 10gbe")] = None
    bandwidth: Annotated[LinkWord, Doc("rate of each link, up and down: 100mbit")] = None
    uplink: Annotated[LinkWord, Doc("rate of what a host sends")] = None
    downlink: Annotated[LinkWord, Doc("rate of what a host receives")] = None
    bandwidth_trace: Annotated[
        LinkWord, Doc("file of the rate over time, up and down: a line for each millisecond at which 1500 bytes pass")
    ] = None
    uplink_trace: Annotated[LinkWord, Doc("such a file for what a host sends")] = None
    downlink_trace: Annotated[LinkWord, Doc("such a file for what a host receives")] = None
    latency: Annotated[LinkWord, Doc("one-way delay of what a host sends, half of two hosts' round trip: 5ms")] = None
    jitter: Annotated[LinkWord, Doc("how far the delay varies, either way; frames keep their order: 1ms")] = None
    loss: Annotated[LinkWord, Doc("share of the frames that a host sends that are lost, each for itself: 1%")] = None
    cluster_file: Annotated[
        str | None,
        Doc("a TOML file that describes uneven virtual hosts"),
        Flag(VIRTUAL_HOSTS, name="--cluster"),
        NOT_RECORDED,
    ] = None
    # What comes of these words. The columns say all of it, so the cluster itself need not identify anything.
    cluster: Annotated[dict[str, Any] | None, Doc("the virtual hosts, as `Cluster.to_dict`"), NOT_RECORDED] = None
    uplink_bps: Annotated[
        float | None,
        Doc("slowest rate set for what a host sends, of a trace its mean (empty: not limited)"),
        Recorded(unit="bit/s"),
    ] = None
    downlink_bps: Annotated[
        float | None, Doc("slowest rate set for what a host receives, likewise"), Recorded(unit="bit/s")
    ] = None
    link_trace: Annotated[str | None, Doc("file and digest of the rates over time (empty: they are constant)")] = None
    latency_s: Annotated[float | None, Doc("longest one-way delay set on a link"), Recorded(unit="s")] = None
    jitter_s: Annotated[float | None, Doc("by how much the delay varies, either way"), Recorded(unit="s")] = None
    loss_ratio: Annotated[float | None, Doc("largest share of a host's frames that is lost on purpose")] = None
    cpu_share: Annotated[float | None, Doc("smallest share of the time in which a host's processes run")] = None
    cluster_digest: Annotated[str | None, Doc("hash of all links, where hosts are not equal (empty: they are)")] = None
