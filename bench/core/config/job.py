"""Options that commands share: `JobConfig` for any job, `RanksConfig` for jobs of several ranks."""

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt
from typing_extensions import Doc

from bench.core.config.configuration import NOT_GIVEN, NOT_RECORDED, Configuration, Flag, Recorded, syntax
from bench.core.config.syntax import Endpoint

MEASUREMENT = "Measurement"
PROCESSES = "Processes"
MACHINES = "Several machines"
VIRTUAL_HOSTS = "Virtual hosts"
OUTPUT = "Output"

DEFAULT_WORLD_SIZE = 2
MAX_RANKS = 4096
# Random number generators take a seed of 32 bits.
MAX_SEED = 2**32 - 1
# Ten days; poll() counts milliseconds in 31 bits.
MAX_TIMEOUT_S = 864_000

RankCount = Annotated[int, Ge(1), Le(MAX_RANKS)]

Threads = Annotated[int, Ge(1), Le(1024), Doc("threads per rank for tensor operations")]
BucketMb = Annotated[float, Ge(0.001), Le(1e6), Doc("DDP's bucket size in MiB"), Recorded(unit="MiB")]
DataDir = Annotated[str, Doc("folder of the data sets"), NOT_RECORDED]
DATA_DIR = "data"
# An option that describes links. Not its text is recorded, but the numbers computed from it (`RanksConfig.uplink_bps`
# and those below it).
LinkWord = Annotated[str | None, Flag(VIRTUAL_HOSTS), NOT_RECORDED]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig(Configuration):
    """Options of a job of one or more processes."""

    seed: Annotated[int, Ge(0), Le(MAX_SEED), Doc("seed of everything random"), Flag(MEASUREMENT)] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Doc("device to compute on: cpu, cuda, or auto: cuda if torch sees enough GPUs"),
        Flag(PROCESSES),
    ] = "auto"
    timeout_s: Annotated[
        float,
        Ge(1),
        Le(MAX_TIMEOUT_S),
        Doc("most seconds that one step, sum or round of sums may take; then the job ends and names the late rank"),
        Flag(PROCESSES, name="--timeout"),
        NOT_RECORDED,
    ] = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanksConfig(JobConfig):
    """Options of a job of several ranks: their number, their machines or virtual hosts, and the links between these."""

    world_size: Annotated[
        RankCount,
        Doc("ranks of the whole job"),
        Flag(PROCESSES, chosen=f"{DEFAULT_WORLD_SIZE}, or as many as the virtual hosts have"),
    ] = NOT_GIVEN
    threads: Annotated[Threads, Flag(PROCESSES, chosen="cores / ranks")] = NOT_GIVEN
    nnodes: Annotated[
        RankCount, Doc("number of machines; start the same command on each"), Flag(MACHINES), NOT_RECORDED
    ] = 1
    node_rank: Annotated[
        int, Ge(0), Lt(MAX_RANKS), Doc("number of this machine, from 0"), Flag(MACHINES), NOT_RECORDED
    ] = 0
    rdzv_endpoint: Annotated[
        str | None,
        Doc("HOST:PORT of machine 0, where the machines meet"),
        Flag(MACHINES),
        NOT_RECORDED,
        syntax(Endpoint.parse),
    ] = None
    hosts: Annotated[
        int | None,
        Ge(1),
        Le(MAX_RANKS),
        Doc("number of virtual hosts on this machine (in rows of runs without virtual hosts: number of machines)"),
        Flag(VIRTUAL_HOSTS),
    ] = None
    ranks_per_host: Annotated[
        RankCount, Doc("ranks on each host"), Flag(VIRTUAL_HOSTS, chosen="1 on a virtual host")
    ] = NOT_GIVEN
    network: Annotated[LinkWord, Doc("a named network: adsl, 4g, wifi, 1gbe or 10gbe")] = None
    bandwidth: Annotated[LinkWord, Doc("rate of each host's link in both directions: 100mbit")] = None
    uplink: Annotated[LinkWord, Doc("rate at which a host can send: 10mbit")] = None
    downlink: Annotated[LinkWord, Doc("rate at which a host can receive: 100mbit")] = None
    bandwidth_trace: Annotated[
        LinkWord,
        Doc("file of a rate that varies, both directions; each line is a time in ms at which 1500 bytes may pass"),
    ] = None
    uplink_trace: Annotated[LinkWord, Doc("file like --bandwidth-trace, only for what a host sends")] = None
    downlink_trace: Annotated[LinkWord, Doc("file like --bandwidth-trace, only for what a host receives")] = None
    latency: Annotated[
        LinkWord, Doc("one-way delay of what a host sends, half of the round-trip time between two hosts: 5ms")
    ] = None
    jitter: Annotated[
        LinkWord, Doc("largest random deviation from the delay, up or down; frames keep their order: 1ms")
    ] = None
    loss: Annotated[LinkWord, Doc("probability that a frame that a host sends is lost: 1%")] = None
    cluster_file: Annotated[
        str | None,
        Doc("TOML file that describes virtual hosts that differ"),
        Flag(VIRTUAL_HOSTS, name="--cluster"),
        NOT_RECORDED,
    ] = None
    # Computed from the options above. The recorded numbers and the digest describe the cluster completely, so the
    # cluster itself is no part of the identity.
    cluster: Annotated[dict[str, Any] | None, Doc("the virtual hosts, as `Cluster.to_dict`"), NOT_RECORDED] = None
    uplink_bps: Annotated[
        float | None,
        Doc("slowest sending rate set for a host; of a varying rate, the mean (empty: not limited)"),
        Recorded(unit="bit/s"),
    ] = None
    downlink_bps: Annotated[
        float | None,
        Doc("slowest receiving rate set for a host; of a varying rate, the mean (empty: not limited)"),
        Recorded(unit="bit/s"),
    ] = None
    link_trace: Annotated[str | None, Doc("name and digest of the trace files (empty: the rates are constant)")] = None
    latency_s: Annotated[float | None, Doc("longest one-way delay set for a link"), Recorded(unit="s")] = None
    jitter_s: Annotated[
        float | None, Doc("largest random deviation from the delay, up or down"), Recorded(unit="s")
    ] = None
    loss_ratio: Annotated[float | None, Doc("largest share of a host's frames that is lost on purpose")] = None
    cpu_share: Annotated[float | None, Doc("smallest share of the time in which a host's processes may run")] = None
    cluster_digest: Annotated[str | None, Doc("hash of all links (empty: all hosts are equal)")] = None
