"""`RecodingSum`, the base of the collectives that encode sums again, and the collective `ring:requantise=true`.

The residual of a sum is what its encoding leaves out; it is added to a later sum of the same elements. So the results
of all sums, plus the residuals that the ranks keep, equal everything that the ranks have contributed.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from collectives.base import BoundCollective, Collective, PendingSum, SumEncoder, without_residuals
from collectives.options import OptionError
from collectives.payloads.base import Payload, PayloadError, shifted
from collectives.payloads.codes import Codes
from collectives.schedule.execution import PackedPieces, together
from collectives.schedule.rounds import LayerStretch, Layout, Piece, leaves, stretches_between
from collectives.transport.base import Receive, ReduceOp, Transport, wait_all

# In place of a rank: all ranks keep an equal share of the residual, as after resuming with another number of ranks.
EVERY_RANK = -1

ByStretch = dict[LayerStretch, torch.Tensor]  # fp32 [elements of the stretch]


class RecodingSum(BoundCollective):
    """A collective on one rank that encodes sums again, and adds the residuals (encoding errors) to the next sums.

    A sum produces new residuals; later sums use them only after `commit`.

    Args:
        options: the collective.
        transport: connects the ranks.
        encoder: encodes sums with the run's compressor; if None, only sums that need no encoding are possible.
    """

    def __init__(self, options: Collective, transport: Transport, encoder: SumEncoder | None = None) -> None:
        super().__init__(options, transport, encoder)
        self._residuals: ByStretch = {}
        self._proposed: ByStretch = {}
        self._keepers: dict[LayerStretch, int] = {}  # the rank that keeps each residual, if residuals can move

    @property
    def encoder(self) -> SumEncoder:
        """Return the encoder of sums.

        Raises:
            OptionError: this collective was made without an encoder.
        """
        if self._encoder is None:
            raise OptionError(
                f"{self.options.component_name} encodes sums again or keeps their errors, which needs the compressor "
                f"of a training run; use {without_residuals(self.options)}"
            )
        return self._encoder

    def borders_of(self, layout: Layout) -> list[int]:
        """Return the first element of each layer in a message, and the number of elements of the message.

        Raises:
            PayloadError: the number of elements is not that of the message's layers.
        """
        borders = [0, *itertools.accumulate(map(self.encoder.numel, layout.key))]
        if borders[-1] != layout.numel:
            raise PayloadError(
                f"{self.options.component_name} was given {layout.numel} elements for layers {list(layout.key)}, which "
                f"have {borders[-1]}; give the ids of exactly the layers in the payload"
            )
        return borders

    def add_residuals_to_(self, total: torch.Tensor, stretches: Sequence[LayerStretch]) -> None:
        """Add the current residuals of parts of layers, `stretches`, to `total`, fp32 [elements of all] (mutated)."""
        for stretch, part in by_stretch(total, stretches).items():
            if stretch in self._residuals:
                part.add_(self._residuals[stretch])

    def propose(self, residuals: ByStretch) -> None:
        """Store new residuals of parts of layers until `commit` or `drop`; the caller must not change the tensors."""
        self._proposed |= residuals

    def settle(self, keepers: Mapping[LayerStretch, int]) -> None:
        """Move residuals to the ranks that will encode these parts of layers. Every rank must call this method.

        When DDP rebuilds its buckets, a layer may be encoded by another rank, or be cut at other elements. For each
        range of elements that moves to another rank, one fp32 message is sent, which is counted as `state`. If the same
        ranks encode the same parts as before, nothing is sent.

        Args:
            keepers: for each stretch (range of elements) of the layers, the rank that will encode it; the same on all
                ranks.
        """
        changed = {stretch: keeper for stretch, keeper in keepers.items() if self._keepers.get(stretch) != keeper}
        if not changed:
            return
        rank, layers = self.transport.rank, {stretch.layer for stretch in changed}
        before = {old: keeper for old, keeper in self._keepers.items() if old.layer in layers}
        moves = [
            (old, source, new, keeper, max(new.start, old.start), min(new.stop, old.stop))
            for new, keeper in changed.items()
            for old, source in before.items()
            if old.layer == new.layer and old.start < new.stop and new.start < old.stop
        ]
        device, arrived, receives = self.transport.device, ByStretch(), list[Receive]()
        for old, source, new, keeper, start, stop in moves:
            if keeper != rank:
                continue
            kept = arrived.setdefault(new, torch.zeros(new.stop - new.start, dtype=torch.float32, device=device))
            into = kept[start - new.start : stop - new.start]
            if source in (rank, EVERY_RANK):
                shares = self.transport.world_size if source == EVERY_RANK else 1
                torch.mul(self._part(old, start, stop), shares, out=into)
            else:
                receives.append((into, source))
        sends = [
            (self._part(old, start, stop), keeper)
            for old, source, _, keeper, start, stop in moves
            if source == rank != keeper
        ]
        with self.transport.counted_as("state"):
            wait_all(self.transport.post(sends, receives))
        for old in before.keys() - (keepers.keys() - changed.keys()):
            self._residuals.pop(old, None)
            del self._keepers[old]
        self._residuals |= arrived
        self._keepers |= changed

    def _part(self, stretch: LayerStretch, start: int, stop: int) -> torch.Tensor:
        if stretch not in self._residuals:  # before the first accepted step
            return torch.zeros(stop - start, dtype=torch.float32, device=self.transport.device)
        return self._residuals[stretch][start - stretch.start : stop - stretch.start]

    @property
    @override
    def nbytes(self) -> int:
        kept = (*self._residuals.values(), *self._proposed.values())
        return super().nbytes + sum(residual.nbytes for residual in kept)

    @override
    def commit(self) -> None:
        self._residuals |= self._proposed
        self._proposed = {}

    @override
    def drop(self) -> None:
        self._proposed = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's current residuals, and for each part of a layer the rank that keeps its residual."""
        return {
            "residuals": {tuple(stretch): residual.clone() for stretch, residual in self._residuals.items()},
            "keepers": {tuple(stretch): keeper for stretch, keeper in self._keepers.items()},
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._residuals = {LayerStretch(*each): residual.clone() for each, residual in state["residuals"].items()}
        self._keepers = {LayerStretch(*each): keeper for each, keeper in state["keepers"].items()}
        self._proposed = {}


def by_stretch(total: torch.Tensor, stretches: Sequence[LayerStretch]) -> ByStretch:
    """Return, for each of these ranges of layers, its part of `total`, fp32 [elements of all ranges], as a view."""
    parts = torch.split(total, [stretch.stop - stretch.start for stretch in stretches])
    return dict(zip(stretches, parts, strict=True))


def on_every_rank(shares: dict[tuple[int, int, int], torch.Tensor]) -> dict[str, Any]:
    """Return a state for `load_state_dict` in which every rank keeps the same residuals, `shares`: 1/n of the total."""
    return {"residuals": shares, "keepers": dict.fromkeys(shares, EVERY_RANK)}


class RequantisingRing(RecodingSum):
    """The collective `ring:requantise=true` on one rank: decodes partial sums, adds its own part, and encodes the sum.

    A rank keeps the error of each element that it encodes, and adds the error to its own part of the next sum. This
    needs one fp32 tensor per layer that the rank encodes.
    """

    @override
    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        if layout.itemsize is not None:
            return super().start_like(payload, layout, op)
        borders = self.borders_of(layout)
        stretches = stretches_between(layout.key, borders, 0, layout.numel)
        errors = torch.zeros(layout.numel, dtype=torch.float32, device=payload.device)
        self.add_residuals_to_(errors, stretches)
        pieces = RequantisedPieces(self.transport, payload, layout, self.encoder, borders, errors)
        rounds = self.rounds_of(layout)
        pieces.add_errors_to(rounds[0].sends[0].pieces[0])
        pieces.run(rounds)
        starts = dict(zip(layout.key, borders, strict=False))
        of_layers = by_stretch(errors, stretches)
        self.propose({each: error for each, error in of_layers.items() if pieces.is_coded(starts[each.layer])})
        return PendingSum.done(pieces.total())


class RequantisedPieces(PackedPieces):
    """The pieces (ranges of elements) that a rank holds during a sum of codes; their partial sums are encoded again.

    Args:
        transport, payload, layout: as for `PackedPieces`.
        encoder: encodes partial sums.
        borders: the first element of each layer, and the number of elements.
        errors: fp32 [elements], mutated: the kept errors, which this rank adds to its contribution; replaced with the
            errors of the sums that this rank encodes.
    """

    def __init__(
        self,
        transport: Transport,
        payload: Payload,
        layout: Layout,
        encoder: SumEncoder,
        borders: Sequence[int],
        errors: torch.Tensor,
    ) -> None:
        super().__init__(transport, payload, layout)
        self._encoder, self._errors = encoder, errors
        self._borders, self._key = borders, layout.key
        self._leaves = leaves(payload)
        self._ends = list(itertools.accumulate(leaf.numel for leaf in self._leaves))

    def is_coded(self, element: int) -> bool:
        """Return True if this element lies in a payload of codes."""
        return isinstance(self._leaves[bisect.bisect_right(self._ends, element)], Codes)

    def add_errors_to(self, piece: Piece) -> None:
        """Add the kept errors, if there are any, to this rank's contribution to the piece that it sends first.

        If earlier messages had the same layout, this piece has no kept errors, because the rank encoded only other
        pieces.
        """
        if not self._errors[piece.start : piece.stop].any():
            return
        parts, start = [], piece.start
        for part in leaves(self[piece.place]):
            parts.append(self._encoded(start, [part], hop=0) if isinstance(part, Codes) and part.numel else part)
            start += part.numel
        self.held[piece.place] = together(parts)

    @override
    def add(self, piece: Piece, first: Payload, second: Payload) -> Payload:
        if [leaf.numel for leaf in leaves(first)] != [leaf.numel for leaf in leaves(second)]:
            raise PayloadError("a ring's partial sum holds other payloads than this rank's own part")
        sums, start = [], piece.start
        for received, own in zip(leaves(first), leaves(second), strict=True):
            if not isinstance(own, Codes):
                sums.append(received.add(own, shifted(self._keep_lost, start)))
            elif own.numel:
                sums.append(self._encoded(start, [own, received], hop=len(piece.terms)))
            else:
                sums.append(own)
            start += own.numel
        return together(sums)

    def _encoded(self, start: int, terms: Sequence[Payload], hop: int) -> Payload:
        """Return the codes of the kept errors plus all terms, added in this order; keep the new error instead."""
        total = self._errors[start : start + terms[0].numel]
        for term in terms:
            term.add_to_(total)
        stretches = stretches_between(self._key, self._borders, start, start + total.numel())
        encoded = self._encoder.encode(total, stretches, hop)
        encoded.subtract_from_(total)
        return encoded
