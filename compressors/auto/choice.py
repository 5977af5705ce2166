"""Choices of compressor `auto`: which compressor-collective pair sends each layer, and a reducer that follows them.

Every pair has its own reducer, which keeps the residuals (the parts of gradients that were not sent) of its layers.
When a layer changes to another pair, its residual is added to its next gradient, so nothing is lost except by rounding
to the gradient's type.
"""

import collections
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from typing_extensions import override

from collectives.base import BoundCollective, Collective, Key, PendingSum
from collectives.options import Spec, build, incompatibility
from collectives.payloads.base import Payload
from collectives.transport.base import Transport
from compressors.base import Compressor
from compressors.layer import Layer, copies, memory_nbytes
from gradwire.exchange.reducer import PendingReduction, Reducer, StartSum, reducer_for
from gradwire.exchange.report import Bucket

FIRST = "nothing is measured yet"


class Pair(NamedTuple):
    """A compressor and a collective, each as a text that users write, such as ``group_topk:ratio=0.1`` and ``ring``."""

    compressor: str
    collective: str

    def __str__(self) -> str:
        return f"{self.compressor} on {self.collective}"

    def built(self) -> tuple[Compressor, Collective]:
        """Create and return the compressor and the collective of this pair.

        Raises:
            OptionError: there is no such component, or an option is wrong.
        """
        return build("compressors", Compressor, self.compressor), build("collectives", Collective, self.collective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Layers that are sent by the same compressor-collective pair.

    Attributes:
        pair: the compressor and the collective of these layers.
        layers: the ids of the layers, ascending.
        why: the reason for this pair, as a phrase for the column `chosen_because` of `layers.csv`.
    """

    pair: Pair
    layers: tuple[int, ...]
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The compressor-collective pair of every layer from a given step on; the field `decision` of a `StepReport`.

    Attributes:
        step: index of the first step with these pairs.
        parts: the layers, grouped by pair; each layer that has elements is in exactly one part.
    """

    step: int
    parts: tuple[Part, ...]

    @classmethod
    def of_all(cls, step: int, pair: Pair, layers: Iterable[Layer], why: str) -> Self:
        """Return a choice in which the same compressor-collective pair sends all layers.

        Args:
            step: index of the first step with this choice.
            pair: the compressor and the collective of all layers.
            layers: the layers that have elements.
            why: the reason for this choice, as a phrase.
        """
        return cls(step=step, parts=(Part(pair=pair, layers=tuple(layer.id for layer in layers), why=why),))

    def of_layer(self, layer_id: int) -> Part | None:
        """Return the part (layers with the same pair) that contains this layer; None if the layer has no elements."""
        return next((part for part in self.parts if layer_id in part.layers), None)

    @functools.cached_property
    def pair_of(self) -> dict[int, Pair]:
        """Return the compressor-collective pair of each layer that has elements, by layer id."""
        return {layer_id: part.pair for part in self.parts for layer_id in part.layers}

    def columns(self, layers: Iterable[Layer]) -> dict[str, Any]:
        """Return the column `chosen` of `metrics.csv`: all compressor-collective pairs in use.

        If there are several pairs, each is followed by its share of the model's elements, as in "bf16 on ring 12.5%".

        Args:
            layers: every layer of the model.
        """
        numel = {layer.id: layer.numel for layer in layers}
        if len(self.parts) == 1:
            return {"chosen": str(self.parts[0].pair)}
        shares = ((part, sum(map(numel.__getitem__, part.layers)) / sum(numel.values())) for part in self.parts)
        return {"chosen": ", ".join(f"{part.pair} {share:.1%}" for part, share in shares)}

    def layer_columns(self, layer: Layer) -> dict[str, Any]:
        """Return a layer's columns `chosen` and `chosen_because` of `layers.csv`; {} for a layer without elements."""
        part = self.of_layer(layer.id)
        return {} if part is None else {"chosen": str(part.pair), "chosen_because": part.why}

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as values that JSON can store; a line of `choices.jsonl` has these values."""
        return {
            "step": self.step,
            "parts": [{**part.pair._asdict(), "layers": list(part.layers), "why": part.why} for part in self.parts],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restore a choice from the values that `to_dict` returned.

        Raises:
            KeyError, TypeError, ValueError or AttributeError: `to_dict` cannot have returned these values.
        """
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
    """Return the choices in a file such as `choices.jsonl`: one JSON object per line, in the order of their steps.

    If the last line is incomplete, because the run was killed, it is ignored.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a choice; the message quotes the line.
    """
    choices, lines = [], path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            choices.append(Choice.from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number < len(lines):
                raise ValueError(f"'{line[:40]}' is not a choice: {error}") from None
    return choices


def pairs_on(collective: Collective) -> list[Pair]:
    """Return the compressor-collective pairs that `auto` tries, from dense to sparse.

    Pairs whose compressor and collective do not work together are left out. `native` is in a pair only if it is the
    run's collective, because its bytes are computed, not counted.

    Args:
        collective: the run's collective. Dense pairs use it; other pairs use `allgather`, except that `group_topk` uses
            the run's collective if that is `hierarchical`.
    """
    name = str(Spec(collective.component_name, collective.option_texts(only_changed=True)))
    sparse = name if collective.component_name == "hierarchical" else "allgather"
    wanted = [
        Pair("none", name),
        Pair("bf16", name),
        Pair("group_topk:ratio=0.1", sparse),
        Pair("hylo", "allgather"),
        Pair("group_topk", sparse),
        Pair("qsparse", "allgather"),
    ]
    built = {pair: pair.built() for pair in wanted}
    return [
        pair for pair, (compressor, sums) in built.items() if not incompatibility(compressor.check_compatible, sums)
    ]


def dense_pair(collective: Collective) -> Pair:
    """Return compressor `bf16` with the run's collective: the error of `bf16` is small enough for every layer."""
    return next(pair for pair in pairs_on(collective) if pair.compressor == "bf16")


class BoundPair(NamedTuple):
    """A compressor-collective pair on this rank: its reducer, which keeps residuals, and its bound collective."""

    reducer: Reducer
    collective: BoundCollective


class ChosenPairs(Reducer):
    """A reducer that sends each layer by the compressor-collective pair that the current choice assigns to the layer.

    Args:
        compressor: the compressor `auto`.
        choice: the first choice.
        bind: binds a collective to this rank's transport.

    Attributes:
        choice: the choice in use.
        wire_s: seconds in which messages were sent or waited for; the caller sets it to 0 before each step.
        look: called with every bucket before the bucket is sent; None if there is nothing to call.
    """

    def __init__(self, compressor: Compressor, choice: Choice, bind: Callable[[Collective], BoundCollective]) -> None:
        super().__init__(compressor)
        self.choice, self.wire_s = choice, 0.0
        self.look: Callable[[Bucket], None] | None = None
        self._bind = bind
        self._bound_pairs: dict[Pair, BoundPair] = {}
        self._carried: dict[int, torch.Tensor] = {}
        self._added: set[int] = set()

    def bound(self, pair: Pair) -> BoundPair:
        """Return the reducer and the bound collective of a compressor-collective pair.

        Both are created in the first call for this pair. Every rank must call this method.
        """
        if pair not in self._bound_pairs:
            compressor, collective = pair.built()
            self._bound_pairs[pair] = BoundPair(reducer_for(compressor), self._bind(collective))
        return self._bound_pairs[pair]

    def switch(self, choice: Choice) -> None:
        """Use another choice from the next step on. Every rank must call this method, between two steps.

        The residuals of layers that change to another compressor-collective pair are added to their next gradients.
        """
        for pair, bound in self._bound_pairs.items():
            staying = {layer_id for part in choice.parts if part.pair == pair for layer_id in part.layers}
            state = bound.reducer.state_dict()
            for layer_id, residual in state["residuals"].items():
                if layer_id not in staying:
                    waiting = self._carried.get(layer_id)
                    self._carried[layer_id] = residual if waiting is None else waiting + residual
            kept = {name: _only(state[name], staying) for name in ("residuals", "velocities")}
            memory = {name: _only(tensors, staying) for name, tensors in state["memory"].items()}
            bound.reducer.load_state_dict(kept | {"memory": memory})
        self.choice = choice

    @override
    def start(self, bucket: Bucket, start_sum: StartSum, transport: Transport) -> PendingReduction:
        bucket.screen()
        if self.look is not None:
            self.look(bucket)
        for index, layer in enumerate(bucket.layers):
            if (residual := self._carried.get(layer.id)) is not None:
                update = bucket.updates[index]
                bucket.gradients[index] = torch.add(bucket.gradients[index], residual.to(update.device), out=update)
                self._added.add(layer.id)
        of_pair: dict[Pair, list[int]] = {}
        for index, layer in enumerate(bucket.layers):
            if layer.numel:  # layers without elements have no pair
                of_pair.setdefault(self.choice.pair_of[layer.id], []).append(index)
        parts, pendings = [], []
        for pair, indices in sorted(of_pair.items()):
            bound = self.bound(pair)
            parts.append(bucket.part(indices))
            pendings.append(bound.reducer.start(parts[-1], self._timed(bound.collective), transport))
        bucket.gradients = bucket.updates

        def wait() -> None:
            started = time.perf_counter()
            for pending in pendings:
                pending.wait()
            self.wire_s += time.perf_counter() - started

        def finish() -> None:
            for part, pending in zip(parts, pendings, strict=True):
                pending.finish()
                bucket.encoded += part.encoded
                bucket.encode_s += part.encode_s

        return PendingReduction(wait=wait, finish=finish)

    @override
    def commit(self) -> None:
        last_encoded: dict[Key, Payload] = {}
        for bound in self._bound_pairs.values():
            bound.reducer.commit()
            bound.collective.commit()
            last_encoded |= bound.reducer.last_encoded
        self.last_encoded = last_encoded
        for layer_id in self._added:
            del self._carried[layer_id]
        self._added = set()

    @override
    def drop(self) -> None:
        for bound in self._bound_pairs.values():
            bound.reducer.drop()
            bound.collective.drop()
        self._added = set()

    @override
    def residual_norms(self) -> dict[int, float]:
        norms = {layer_id: float(residual.norm()) for layer_id, residual in self._carried.items()}
        for bound in self._bound_pairs.values():
            norms |= bound.reducer.residual_norms()
        return norms

    @property
    @override
    def nbytes(self) -> dict[str, int]:
        total = collections.Counter({"residual": memory_nbytes(self._carried.values())})
        for bound in self._bound_pairs.values():
            total.update(bound.reducer.nbytes)
        return dict(total)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "choice": self.choice.to_dict(),
            "carried": copies(self._carried),
            "pairs": [[*pair, bound.reducer.state_dict()] for pair, bound in self._bound_pairs.items()],
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.choice = Choice.from_dict(state["choice"])
        self._carried, self._added = copies(state["carried"]), set()
        saved = {Pair(compressor, collective): kept for compressor, collective, kept in state["pairs"]}
        for pair in {**self._bound_pairs, **saved}:
            kept = saved.get(pair, {"residuals": {}, "velocities": {}, "memory": {}})
            self.bound(pair).reducer.load_state_dict(kept)

    def _timed(self, collective: BoundCollective) -> StartSum:
        """Return a function that starts a sum through this collective, and adds the time of the start to `wire_s`."""

        def start(payload: Payload, key: Key) -> PendingSum:
            started = time.perf_counter()
            pending = collective.start(payload, key)
            self.wire_s += time.perf_counter() - started
            return pending

        return start


def _only(tensors: Mapping[int, Any], layer_ids: Collection[int]) -> dict[int, Any]:
    return {layer_id: tensor for layer_id, tensor in tensors.items() if layer_id in layer_ids}
