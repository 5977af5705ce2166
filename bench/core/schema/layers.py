"""Columns of layers.csv, which describes what was sent for each layer: one row per layer and evaluation of a run."""

from __future__ import annotations

from functools import partial

from bench.core.schema.column import Column, identity, seconds

_layer = partial(Column, "layer")

LAYERS: tuple[Column, ...] = (
    identity("run_id", str, "the run's folder name", deterministic=False),
    identity("epoch", float, "epochs finished at this evaluation"),
    identity("step", int, "optimizer steps done at this evaluation"),
    identity("layer", str, "the parameter's name"),
    _layer("kind", str, "conv, linear, norm, bias or other"),
    _layer("numel", int, "number of elements"),
    _layer("payload", str, "kind of payload that the layer is sent as; several messages per step are joined by +"),
    _layer("payload_bytes", float, "encoded bytes per step, mean since the previous row", unit="bytes"),
    _layer("density_min", float, "smallest share of entries sent in one message, since the previous row"),
    _layer("density_mean", float, "mean share of entries sent in one message, since the previous row"),
    _layer("density_max", float, "largest share of entries sent in one message, since the previous row"),
    _layer(
        "density_wanted",
        float,
        "mean share of entries that the compressor was configured to send (empty: it has no such target)",
    ),
    _layer(
        "density_of_wanted_min",
        float,
        "smallest (share sent / share wanted) of any step on rank 0; above 1 where at least one entry must be sent, "
        "0 where all entries are zero",
    ),
    _layer("density_of_wanted_max", float, "largest (share sent / share wanted) of any step on rank 0"),
    _layer("residual_norm", float, "L2 norm of the error-feedback residual on rank 0 (empty: no residual is kept)"),
    seconds("layer", "encode_s", "time to encode the layer, mean per step (a bucket's time is divided by layer size)"),
    _layer("chosen", str, "compressor and collective that auto now uses for the layer (empty: not chosen by auto)"),
    _layer("chosen_because", str, "measurements for which auto chose them"),
)
