"""The CSV file of `bench collectives`: one row per collective, payload and size."""

from __future__ import annotations

from functools import partial

from bench.core.config.collectives import CollectivesConfig
from bench.core.schema.column import Column, bytes_per_s, declared_columns, identity, num_bytes, seconds
from bench.core.schema.metrics import ORIGIN

_network = partial(Column, "network")

COLLECTIVES: tuple[Column, ...] = (
    identity("collective", str, "collective"),
    identity("payload", str, "compressor that made the payload; none: the tensor as it is"),
    identity("size_bytes", int, "bytes of the tensor that is summed, before compression", unit="bytes"),
    identity("count", int, "its elements"),
    *declared_columns(CollectivesConfig),
    _network(
        "measured_bandwidth_bps",
        float,
        "slowest rate between two hosts, measured before the first sum",
        unit="bit/s",
        deterministic=False,
    ),
    _network(
        "measured_rtt_s",
        float,
        "round trip time between two hosts, likewise: median over hosts",
        unit="s",
        deterministic=False,
    ),
    _network(
        "measured_loss_ratio",
        float,
        "share of datagrams that were lost, likewise (where links lose frames on purpose)",
        deterministic=False,
    ),
    _network(
        "forwarder_cpu_share",
        float,
        "share of one core that the forwarder between virtual hosts took during the sums (empty: none was needed)",
        better="lower",
        deterministic=False,
    ),
    _network("wire_headers", str, "exact: the kernel counted real frames; estimated: offload was on"),
    _network(
        "link_warnings",
        str,
        "where a measured link is more than 10 % off, or otherwise not what was asked",
        deterministic=False,
    ),
    seconds(
        "speed",
        "time_p50_s",
        "time of one sum on the slowest rank, until it lies in a dense tensor: median of a round, median over rounds",
    ),
    seconds("speed", "time_p95_s", "95th percentile likewise"),
    bytes_per_s("speed", "algbw_Bps", "size_bytes / time_p50_s"),
    bytes_per_s(
        "speed",
        "busbw_Bps",
        "algbw_Bps x 2(n-1)/n for n ranks: for dense payloads, comparable with the rate of a link",
    ),
    Column(
        "health",
        "num_wrong",
        int,
        "elements that are not what a serial sum in the documented order gives (native: not within its error bound), "
        "all ranks and rounds together",
        better="lower",
    ),
    Column("wire", "messages", float, "messages sent per sum, mean over ranks (empty: the backend hides them)"),
    num_bytes("wire", "bytes_sent", "bytes sent per sum, mean over ranks (native: by the formula 2(n-1)/n)"),
    num_bytes(
        "wire",
        "wire_bytes_sent",
        "bytes of whole frames sent per sum and host, mean over hosts, counted by the kernel (virtual hosts only): "
        "headers and acknowledgements are in it, the barrier between sums is not",
        deterministic=False,
    ),
    Column(
        "speed",
        "of_limit",
        float,
        "time in which the busiest link could have carried its frames / time_p50_s (virtual hosts with a rate only)",
        better="higher",
        deterministic=False,
    ),
    *ORIGIN,
)
