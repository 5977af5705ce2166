"""Columns of links.csv, for models spread over devices: one row per evaluation and pair of communicating processes."""

from __future__ import annotations

from bench.core.schema.column import Column, identity, num_bytes

LINKS: tuple[Column, ...] = (
    identity("run_id", str, "the run's folder name", deterministic=False),
    identity("epoch", float, "epochs finished at this evaluation"),
    identity("step", int, "optimizer steps done at this evaluation"),
    identity("source", str, "sender: the host or a device"),
    identity("to", str, "receiver: the host or a device"),
    num_bytes(
        "wire",
        "activation_bytes",
        "bytes of mini-batches, activations and their gradients per step, mean since the previous row",
    ),
)
