"""Rows of `layers.csv`: what this rank has sent for each layer since the previous row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from compressors.ddp.report import Decision, EncodedLayer
from compressors.layer import Layer


@dataclasses.dataclass(kw_only=True)
class RunningStats:
    """Statistics of the numbers added so far.

    Attributes:
        count: how many numbers were added.
        total: their sum.
        least, largest: the smallest and the largest; None if there are no numbers.
    """

    count: int = 0
    total: float = 0.0
    least: float | None = None
    largest: float | None = None

    def add(self, value: float) -> None:
        """Add a number."""
        self.count += 1
        self.total += value
        self.least = value if self.least is None else min(self.least, value)
        self.largest = value if self.largest is None else max(self.largest, value)

    @property
    def mean(self) -> float | None:
        """Return the mean; None if there are no numbers."""
        return self.total / self.count if self.count else None


@dataclasses.dataclass(kw_only=True)
class LayerCounts:
    """Sums over the steps since the previous row, for one layer."""

    payload: str = ""
    nbytes: float = 0.0
    seconds: float = 0.0
    density: RunningStats = dataclasses.field(default_factory=RunningStats)
    wanted: RunningStats = dataclasses.field(default_factory=RunningStats)
    of_wanted: RunningStats = dataclasses.field(default_factory=RunningStats)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """Return the counts of which `dataclasses.asdict` made this dict."""
        fields: dict[str, Any] = {n: RunningStats(**v) if isinstance(v, dict) else v for n, v in saved.items()}
        return cls(**fields)


def count_layers(counts: dict[int, LayerCounts], encoded: Sequence[EncodedLayer]) -> None:
    """Add what one step has encoded to the counts, which are by layer id."""
    kinds: dict[int, dict[str, None]] = {}
    for part in encoded:
        count = counts.setdefault(part.layer.id, LayerCounts())
        kinds.setdefault(part.layer.id, {})[part.payload] = None
        count.payload = "+".join(kinds[part.layer.id])
        count.nbytes += part.nbytes
        count.seconds += part.seconds
        density = part.num_entries / max(1, part.layer.numel)
        count.density.add(density)
        if part.density_wanted is not None:
            count.wanted.add(part.density_wanted)
            count.of_wanted.add(density / part.density_wanted)


def layer_rows(
    layers: Sequence[Layer],
    counts: Mapping[int, LayerCounts],
    num_steps: int,
    residual_norms: Mapping[int, float],
    decision: Decision | None,
) -> list[dict[str, Any]]:
    """Return one row per layer, without the columns that say which evaluation it belongs to.

    Args:
        layers: the model's trainable parameters.
        counts: sums over `num_steps` steps, by layer id.
        num_steps: this rank's steps since the previous row.
        residual_norms: L2 norm of each layer's residual, by layer id.
        decision: what the exchange has decided; None if it decides nothing.
    """
    rows = []
    for layer in layers:
        count = counts.get(layer.id, LayerCounts())
        row = {
            "layer": layer.name,
            "kind": layer.kind,
            "numel": layer.numel,
            "payload": count.payload,
            "payload_bytes": count.nbytes / max(1, num_steps),
            "density_min": count.density.least,
            "density_mean": count.density.mean,
            "density_max": count.density.largest,
            "density_wanted": count.wanted.mean,
            "density_of_wanted_min": count.of_wanted.least,
            "density_of_wanted_max": count.of_wanted.largest,
            "residual_norm": residual_norms.get(layer.id),
            "encode_s": count.seconds / max(1, num_steps),
        }
        rows.append(row | (decision.layer_columns(layer) if decision is not None else {}))
    return rows
