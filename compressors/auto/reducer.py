"""ChosenPairs: the reducer that sends each layer through the pair that was chosen for it.

Each pair has its own reducer. When a layer changes to another pair, its residual is added to its next gradient. So
nothing is lost except the rounding to the gradient's type.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from collectives.base import BoundCollective, Collective, Key, PendingSum
from collectives.payloads.base import Payload
from collectives.transport.base import Transport
from compressors.auto.choice import Choice, Pair
from compressors.base import Compressor
from compressors.ddp.reducer import PendingReduction, Reducer, StartSum, reducer_for
from compressors.ddp.report import Bucket
from compressors.layer import copies

# A function that is called with each bucket before its gradients are sent.
Looked = Callable[[Bucket], None]


@dataclasses.dataclass(kw_only=True, eq=False)
class _BoundPair:
    """The reducer and the bound collective of a pair."""

    reducer: Reducer
    collective: BoundCollective


class ChosenPairs(Reducer):
    """Sends each layer through its pair.

    Args:
        compressor: the compressor `auto`.
        choice: the first choice.
        bind: binds a collective to the ranks.

    Attributes:
        choice: the choice in use.
        wire_s: seconds of the current step in which messages were sent or waited for.
        look: called with every bucket before it is sent; or None.
    """

    def __init__(self, compressor: Compressor, choice: Choice, bind: Callable[[Collective], BoundCollective]) -> None:
        super().__init__(compressor)
        self.wire_s = 0.0
        self.look: Looked | None = None
        self._hold(choice)
        self._bind = bind
        self._bound_pairs: dict[Pair, _BoundPair] = {}
        self._carried: dict[int, torch.Tensor] = {}
        self._added: set[int] = set()

    def collective_of(self, pair: Pair) -> BoundCollective:
        """Return the pair's bound collective; every rank must call."""
        return self._bound(pair).collective

    def switch(self, choice: Choice) -> None:
        """Use another choice from the next step on; call this between steps, on all ranks."""
        for pair, bound in self._bound_pairs.items():
            staying = {layer_id for part in choice.parts if part.pair == pair for layer_id in part.layers}
            state = bound.reducer.state_dict()
            for layer_id, residual in state["residuals"].items():
                if layer_id not in staying:
                    waiting = self._carried.get(layer_id)
                    self._carried[layer_id] = residual if waiting is None else waiting + residual
            bound.reducer.load_state_dict(_only(state, staying))
        self._hold(choice)

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
        parts, pendings = [], []
        for pair, part in self._cut(bucket):
            bound = self._bound(pair)
            parts.append(part)
            pendings.append(bound.reducer.start(part, self._timed(bound.collective), transport))
        bucket.let_go()

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

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "choice": self.choice.to_dict(),
            "carried": copies(self._carried),
            "pairs": [[*pair, bound.reducer.state_dict()] for pair, bound in self._bound_pairs.items()],
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._hold(Choice.from_dict(state["choice"]))
        self._carried, self._added = copies(state["carried"]), set()
        saved = {Pair(compressor, collective): kept for compressor, collective, kept in state["pairs"]}
        for pair in {**self._bound_pairs, **saved}:
            kept = saved.get(pair, {"residuals": {}, "velocities": {}, "memory": {}})
            self._bound(pair).reducer.load_state_dict(kept)

    def _hold(self, choice: Choice) -> None:
        self.choice = choice
        self._pair_of = choice.ways

    def _bound(self, pair: Pair) -> _BoundPair:
        if pair not in self._bound_pairs:
            compressor, collective = pair.built()
            self._bound_pairs[pair] = _BoundPair(reducer=reducer_for(compressor), collective=self._bind(collective))
        return self._bound_pairs[pair]

    def _cut(self, bucket: Bucket) -> Sequence[tuple[Pair, Bucket]]:
        """Return a bucket per pair, with the layers that use it."""
        of_pair: dict[Pair, list[int]] = {}
        for index, layer in enumerate(bucket.layers):
            if not layer.numel:
                continue  # layers without elements have no pair
            of_pair.setdefault(self._pair_of[layer.id], []).append(index)
        return [(pair, bucket.part(indices)) for pair, indices in sorted(of_pair.items())]

    def _timed(self, collective: BoundCollective) -> StartSum:
        """Return the collective's `start`, with its time added to `wire_s`."""

        def start(payload: Payload, key: Key) -> PendingSum:
            started = time.perf_counter()
            pending = collective.start(payload, key)
            self.wire_s += time.perf_counter() - started
            return pending

        return start


def _only(state: dict[str, Any], layer_ids: set[int]) -> dict[str, Any]:
    """Return the part of a reducer's state that belongs to these layers."""
    kept: dict[str, Any] = {
        name: {layer_id: tensor for layer_id, tensor in state[name].items() if layer_id in layer_ids}
        for name in ("residuals", "velocities")
    }
    memory = {
        name: {layer_id: tensor for layer_id, tensor in tensors.items() if layer_id in layer_ids}
        for name, tensors in state["memory"].items()
    }
    return kept | {"memory": memory}
