"""Columns of the files of `bench collectives` and `bench compressors`.

``python -m bench.extensions.microbenchmarks.columns`` writes them to docs/measure-columns.md; a test fails if that page
does not match.
"""

from functools import partial
from pathlib import Path

from bench.core.schema import ORIGIN, Column, bytes_per_s, declared_columns, identity, num_bytes, seconds
from bench.extensions.microbenchmarks.options import CollectivesConfig, CompressorsConfig

_network = partial(Column, "network")

COLLECTIVES: tuple[Column, ...] = (
    identity("collective", str, "collective"),
    identity("payload", str, "compressor that made the payload; none: the tensor is sent uncompressed"),
    identity("size_bytes", int, "bytes of the tensor that is summed, before compression", unit="bytes"),
    identity("count", int, "elements of the tensor that is summed"),
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
        "round-trip time between two hosts, measured before the first sum; median over hosts",
        unit="s",
        deterministic=False,
    ),
    _network(
        "measured_loss_ratio",
        float,
        "share of datagrams that were lost, measured before the first sum (only if links lose frames on purpose)",
        deterministic=False,
    ),
    _network(
        "forwarder_cpu_share",
        float,
        "share of one core that the forwarder between virtual hosts used during the sums (empty: no forwarder)",
        better="lower",
        deterministic=False,
    ),
    _network(
        "wire_headers",
        str,
        "exact: the kernel counted real frames; estimated: segmentation offload was on, so headers are computed",
    ),
    _network(
        "link_warnings",
        str,
        "links whose measured rate, delay or loss differs from the requested one, the rate by more than 10 %",
        deterministic=False,
    ),
    seconds(
        "speed",
        "time_p50_s",
        "time of one sum on the slowest rank, until the result is a dense tensor; median of each round, then median "
        "over rounds",
    ),
    seconds(
        "speed",
        "time_p95_s",
        "time of one sum on the slowest rank: 95th percentile of each round, then median over rounds",
    ),
    bytes_per_s("speed", "algbw_Bps", "size_bytes / time_p50_s"),
    bytes_per_s(
        "speed",
        "busbw_Bps",
        "algbw_Bps x 2(n-1)/n for n ranks; for dense payloads it can be compared with the rate of a link",
    ),
    Column(
        "health",
        "num_wrong",
        int,
        "elements that differ from a serial sum in the documented order (native: by more than its error bound), "
        "summed over ranks and rounds",
        better="lower",
    ),
    Column("wire", "messages", float, "messages sent per sum, mean over ranks (empty: the backend does not tell)"),
    num_bytes(
        "wire", "bytes_sent", "bytes sent per sum, mean over ranks (native: computed as 2(n-1)/n x the tensor's size)"
    ),
    num_bytes(
        "wire",
        "wire_bytes_sent",
        "bytes of Ethernet frames sent per sum and host, mean over hosts, counted by the kernel (virtual hosts only); "
        "includes headers and acknowledgements, but not the barrier between sums",
        deterministic=False,
    ),
    Column(
        "speed",
        "of_limit",
        float,
        "shortest time in which the busiest link could carry its frames / time_p50_s (virtual hosts with a rate only)",
        better="higher",
        deterministic=False,
    ),
    *ORIGIN,
)

_size = partial(Column, "size")
_loss = partial(Column, "loss")

COMPRESSORS: tuple[Column, ...] = (
    identity("compressor", str, "compressor"),
    identity("numel", int, "elements of the gradient"),
    identity("dense_bytes", int, "bytes of the gradient in fp32", unit="bytes"),
    *declared_columns(CompressorsConfig),
    num_bytes("size", "packed_bytes", "bytes of the packed payloads with headers, all buckets, mean over turns"),
    _size("compression_ratio", float, "dense_bytes / packed_bytes", better="higher"),
    _size("bits_per_element", float, "8 x packed_bytes / numel", unit="bits", better="lower"),
    _size("effective_density", float, "entries sent / entries of the gradient"),
    _loss(
        "relative_error",
        float,
        "norm(x - C(x)) / norm(x), mean over turns; x: the gradient plus the residual of earlier turns, C(x): the "
        "decoded payload",
        better="lower",
    ),
    _loss("cosine", float, "cosine of the angle between x and C(x), mean over turns", better="higher"),
    _loss(
        "contraction_seen",
        float,
        "norm(x - C(x))^2 / norm(x)^2, mean over turns, in the layer or bucket where it is largest",
        better="lower",
    ),
    _loss(
        "contraction_proved",
        float,
        "proved upper bound of contraction_seen over all x, in expectation for random methods (1: possibly nothing of "
        "x arrives; empty: no bound is known)",
    ),
    seconds(
        "speed",
        "encode_s",
        "time to add the residual, encode, pack the payload and keep the new residual, all rounds, median over turns",
    ),
    bytes_per_s("speed", "encode_Bps", "dense_bytes / encode_s"),
    seconds("speed", "decode_s", "time from one packed payload to the update, median over turns"),
    bytes_per_s("speed", "decode_Bps", "dense_bytes / decode_s"),
    *ORIGIN,
)

PAGE = Path("docs/measure-columns.md")


def document() -> str:
    """Return the whole text of docs/measure-columns.md."""
    from bench.cli.reference_pages import sections  # imports bench run, so only if it is needed

    return f"""\
<!-- Written by `python -m bench.extensions.microbenchmarks.columns`; edit the columns there, not this page. -->

# Columns of measured parts

This page lists every column that `bench collectives --out` and `bench compressors --out` write. Both commands append to
the file, and `started_at` tells the calls apart. [Columns](columns.md) explains units, *Better* and *Repeats*.

## bench collectives

There is one row per collective, payload and size.

{sections(COLLECTIVES)}
## bench compressors

There is one row per compressor.

{sections(COMPRESSORS)}"""


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
