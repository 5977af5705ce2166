"""Columns of the CSV file of `bench compressors`: one row per compressor."""

from __future__ import annotations

from functools import partial

from bench.core.config.measurements import CompressorsConfig
from bench.core.schema.column import Column, bytes_per_s, declared_columns, identity, num_bytes, seconds
from bench.core.schema.metrics import ORIGIN

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
