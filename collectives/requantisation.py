"""A ring whose payloads are codes: each rank decodes, adds its own part, and encodes the sum again for the next rank.

The error of encoding a sum stays on the rank that made it, per element, and is added to this rank's own part of the
next sum. So the results of all sums, plus the errors that the ranks keep, are what the ranks have contributed.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from collectives.base import AnswerEncoder, BoundCollective, Collective, PendingSum
from collectives.options import OptionError
from collectives.payloads.base import Payload, PayloadError, shifted
from collectives.payloads.codes import Codes
from collectives.schedule.execution import PackedPieces, together
from collectives.schedule.rounds import Layout, Piece, leaves
from collectives.transport.base import ReduceOp, Transport

Errors = dict[int, torch.Tensor]  # by layer id, fp32 [numel]


class RequantisingRing(BoundCollective):
    """The collective `ring` with `requantise=true` on one rank; it keeps one fp32 tensor per layer that it encodes.

    Args:
        options: the collective.
        transport: connects the ranks.
        encoder: encodes partial sums with the run's compressor; without it only element-wise payloads can be summed.
    """

    def __init__(self, options: Collective, transport: Transport, encoder: AnswerEncoder | None) -> None:
        super().__init__(options, transport)
        self._encoder = encoder
        self._errors: Errors = {}
        self._proposed: Errors = {}

    @override
    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        if layout.itemsize is not None:
            return super().start_like(payload, layout, op)
        if self._encoder is None:
            raise OptionError("ring: requantise=true needs the compressor of a training run; use collective allgather")
        numels = [self._encoder.numel(layer_id) for layer_id in layout.key]
        if sum(numels) != layout.numel:
            raise PayloadError(
                f"ring:requantise=true was given {layout.numel} elements for layers {list(layout.key)}, which have "
                f"{sum(numels)}; give the ids of exactly the layers in the payload"
            )
        errors = torch.zeros(layout.numel, dtype=torch.float32, device=payload.device)
        by_layer = dict(zip(layout.key, errors.split(numels), strict=True))
        for layer_id, error in by_layer.items():
            if layer_id in self._errors:
                error.copy_(self._errors[layer_id])
        starts = [0, *itertools.accumulate(numels)][:-1]
        pieces = RequantisedPieces(self.transport, payload, layout, self._encoder, starts, errors)
        rounds = self.rounds_of(layout)
        pieces.add_errors_to(rounds[0].sends[0].pieces[0])
        pieces.run(rounds)
        self._proposed |= {
            layer_id: by_layer[layer_id]
            for layer_id, start in zip(layout.key, starts, strict=True)
            if pieces.is_coded(start)
        }
        return PendingSum.done(pieces.total())

    @property
    @override
    def nbytes(self) -> int:
        return super().nbytes + sum(error.nbytes for error in (*self._errors.values(), *self._proposed.values()))

    @override
    def commit(self) -> None:
        self._errors |= self._proposed
        self._proposed = {}
        if self._encoder is not None:
            self._encoder.commit()

    @override
    def drop(self) -> None:
        self._proposed = {}
        if self._encoder is not None:
            self._encoder.drop()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "errors": {layer_id: error.clone() for layer_id, error in self._errors.items()},
            "downlink": {} if self._encoder is None else self._encoder.state_dict(),
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._errors = {layer_id: error.clone() for layer_id, error in state["errors"].items()}
        self._proposed = {}
        if self._encoder is not None:
            self._encoder.load_state_dict(state["downlink"])


class RequantisedPieces(PackedPieces):
    """The pieces (ranges of elements) that a rank holds during a sum of codes, which it encodes again.

    Args:
        transport, payload, layout: as for `PackedPieces`.
        encoder: encodes partial sums.
        starts: the first element of each layer.
        errors: what this rank adds to its contribution, fp32 [elements]; becomes the errors of what it encodes.
    """

    def __init__(
        self,
        transport: Transport,
        payload: Payload,
        layout: Layout,
        encoder: AnswerEncoder,
        starts: Sequence[int],
        errors: torch.Tensor,
    ) -> None:
        super().__init__(transport, payload, layout)
        self._encoder, self._errors = encoder, errors
        self._starts, self._key = starts, layout.key
        self._leaves = leaves(payload)
        self._ends = list(itertools.accumulate(leaf.numel for leaf in self._leaves))

    def is_coded(self, element: int) -> bool:
        """Return True if this element lies in a payload of codes."""
        return isinstance(self._leaves[bisect.bisect_right(self._ends, element)], Codes)

    def add_errors_to(self, piece: Piece) -> None:
        """Add the kept errors to this rank's contribution to the piece that it sends first, if there are any.

        There are none as long as messages have the same layout: a rank encodes all other pieces.
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
        """Return the codes of the kept errors plus all terms, added in this order; the error is kept instead."""
        total = self._errors[start : start + terms[0].numel]
        for term in terms:
            term.add_to_(total)
        layer = self._key[bisect.bisect_right(self._starts, start) - 1]
        encoded = self._encoder.encode_partial(total, layer, hop)
        encoded.subtract_from_(total)
        return encoded
