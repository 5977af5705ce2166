"""layers.csv: one row per layer and evaluation of a run, with what was sent for it."""

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
    _layer("payload", str, "kind of payload that carried it; of several messages in a step, joined by +"),
    _layer("payload_bytes", float, "encoded bytes per step, mean since the previous row", unit="bytes"),
    _layer("density_min", float, "smallest share of entries sent in a message, since the previous row"),
    _layer("density_mean", float, "mean share of entries sent"),
    _layer("density_max", float, "largest share of entries sent"),
    _layer(
        "density_wanted",
        float,
        "mean share of entries that the compressor meant to send (empty: it sets none for the layer)",
    ),
    _layer(
        "density_of_wanted_min",
        float,
        "smallest share sent / share wanted at one step on rank 0; a whole entry at least is sent, however little is "
        "wanted, and of zeros nothing",
    ),
    _layer("density_of_wanted_max", float, "largest share sent / share wanted at one step, likewise"),
    _layer("residual_norm", float, "L2 norm of the error-feedback residual on rank 0 (empty: none kept)"),
    seconds("layer", "encode_s", "time to encode it, mean per step (a bucket's time is shared by size)"),
    _layer("chosen", str, "pair that auto sends it through now (empty: the run names its pair)"),
    _layer("chosen_because", str, "why this pair: what was measured when it was chosen"),
)
