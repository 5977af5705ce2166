"""Choice: which pair of compressor and collective each layer goes through from some step on, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from collectives.base import Collective
from collectives.options import Spec, build
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
        """Both, with their options."""
        return build("compressors", Compressor, self.compressor), build("collectives", Collective, self.collective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Layers that go the same way.

    Attributes:
        pair: which way.
        layers: their ids, ascending.
        why: this pair, one phrase.
    """

    pair: Pair
    layers: tuple[int, ...]
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What holds from one step on.

    Attributes:
        step: the first one.
        parts: every layer is in one of them.
    """

    step: int
    parts: tuple[Part, ...]

    @classmethod
    def of_all(cls, step: int, pair: Pair, layers: Iterable[Layer], why: str) -> Self:
        """All layers through one pair."""
        return cls(step=step, parts=(Part(pair=pair, layers=tuple(layer.id for layer in layers), why=why),))

    def of_layer(self, layer_id: int) -> Part | None:
        """The part that a layer is in; None of one without elements."""
        return next((part for part in self.parts if layer_id in part.layers), None)

    @property
    def ways(self) -> dict[int, Pair]:
        """The pair that each layer goes through, by its id."""
        return {layer_id: part.pair for part in self.parts for layer_id in part.layers}

    def summary(self, layers: Iterable[Layer]) -> str:
        """The pairs, each with its share of the elements where there are several."""
        numel = {layer.id: layer.numel for layer in layers}
        if len(self.parts) == 1:
            return str(self.parts[0].pair)
        shares = [sum(numel[layer_id] for layer_id in part.layers) / sum(numel.values()) for part in self.parts]
        return ", ".join(f"{part.pair} {share:.1%}" for part, share in zip(self.parts, shares, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "step": self.step,
            "parts": [{**part.pair._asdict(), "layers": list(part.layers), "why": part.why} for part in self.parts],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
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
    """The choices in a file of one JSON object per line; a last line that is cut short is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
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
        raise ValueError(f"'{line[:40]}' is no choice: {error}") from None


def pairs_on(collective: Collective) -> list[Pair]:
    """The pairs that are tried where sums ride on this collective, from dense to sparse.

    None that the backend sums by itself, whose bytes nobody counts, unless that was asked for.
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
        if compressor.refusal(sums) is None:
            possible.append(pair)
    return possible


def dense_pair(collective: Collective) -> Pair:
    """The pair that loses nothing to speak of, and is chosen where nothing pays."""
    return next(pair for pair in pairs_on(collective) if pair.compressor == "bf16")
