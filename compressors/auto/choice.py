"""The choices of compressor `auto`: the pair of compressor and collective for each layer, from a given step on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from collectives.base import Collective
from collectives.options import Spec, build, incompatibility
from compressors.base import Compressor
from compressors.layer import Layer

FIRST = "nothing is measured yet"


class Pair(NamedTuple):
    """A compressor and a collective, as spec texts."""

    compressor: str
    collective: str

    def __str__(self) -> str:
        return f"{self.compressor} on {self.collective}"

    def built(self) -> tuple[Compressor, Collective]:
        """Build the compressor and the collective."""
        return build("compressors", Compressor, self.compressor), build("collectives", Collective, self.collective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Layers that use the same pair.

    Attributes:
        pair: their compressor and collective.
        layers: the ids of the layers, ascending.
        why: the reason for this pair, as a phrase.
    """

    pair: Pair
    layers: tuple[int, ...]
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The pairs of all layers from a given step on.

    Attributes:
        step: the first step with these pairs.
        parts: the layers by pair; each layer with elements is in exactly one part.
    """

    step: int
    parts: tuple[Part, ...]

    @classmethod
    def of_all(cls, step: int, pair: Pair, layers: Iterable[Layer], why: str) -> Self:
        """Return the choice that uses one pair for all layers."""
        return cls(step=step, parts=(Part(pair=pair, layers=tuple(layer.id for layer in layers), why=why),))

    def of_layer(self, layer_id: int) -> Part | None:
        """Return the part that contains a layer; None for a layer without elements."""
        return next((part for part in self.parts if layer_id in part.layers), None)

    @property
    def ways(self) -> dict[int, Pair]:
        """Return the pair of each layer, by layer id."""
        return {layer_id: part.pair for part in self.parts for layer_id in part.layers}

    def columns(self, layers: Iterable[Layer]) -> dict[str, Any]:
        """Return the columns of `metrics.csv`."""
        return {"chosen": self.summary(layers)}

    def layer_columns(self, layer: Layer) -> dict[str, Any]:
        """Return a layer's columns of `layers.csv`; none for a layer without elements."""
        part = self.of_layer(layer.id)
        return {} if part is None else {"chosen": str(part.pair), "chosen_because": part.why}

    def summary(self, layers: Iterable[Layer]) -> str:
        """Return the pairs as text; if there are several parts, with their shares of the elements."""
        numel = {layer.id: layer.numel for layer in layers}
        if len(self.parts) == 1:
            return str(self.parts[0].pair)
        shares = [sum(numel[layer_id] for layer_id in part.layers) / sum(numel.values()) for part in self.parts]
        return ", ".join(f"{part.pair} {share:.1%}" for part, share in zip(self.parts, shares, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as values for JSON."""
        return {
            "step": self.step,
            "parts": [{**part.pair._asdict(), "layers": list(part.layers), "why": part.why} for part in self.parts],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a choice from the result of `to_dict`."""
        parts = tuple(
            Part(
                pair=Pair(str(part["compressor"]), str(part["collective"])),
                layers=tuple(int(layer_id) for layer_id in part["layers"]),
                why=str(part["why"]),
            )
            for part in values["parts"]
        )
        return cls(step=int(values["step"]), parts=parts)


def read_choices(path: Path) -> list[Choice]:
    """Read choices from a file with one JSON object per line; an incomplete last line is ignored.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a choice.
    """
    *whole, last = path.read_text(encoding="utf-8").split("\n")
    choices = [_choice(line) for line in whole]
    if last:
        with contextlib.suppress(ValueError):
            choices.append(_choice(last))
    return choices


def _choice(line: str) -> Choice:
    try:
        return Choice.from_dict(json.loads(line))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{line[:40]}' is not a choice: {error}") from None


def pairs_on(collective: Collective) -> list[Pair]:
    """Return the pairs that `auto` tries with this collective of the run, from dense to sparse.

    `native` is used only if it is the run's collective, because its bytes are not counted.
    """
    name = str(Spec(collective.component_name, collective.option_texts(only_changed=True)))
    wanted = [
        Pair("none", name),
        Pair("bf16", name),
        Pair("group_topk:ratio=0.1", name),
        Pair("hylo", "allgather"),
        Pair("group_topk", name),
        Pair("qsparse", "allgather"),
    ]
    possible = []
    for pair in dict.fromkeys(wanted):
        compressor, sums = pair.built()
        if incompatibility(compressor.check_compatible, sums) is None:
            possible.append(pair)
    return possible


def dense_pair(collective: Collective) -> Pair:
    """Return the pair with almost no error, which is used if no other pair is faster."""
    return next(pair for pair in pairs_on(collective) if pair.compressor == "bf16")
