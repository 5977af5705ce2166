"""A ring whose payloads are codes: each rank decodes, adds its own part, and encodes the sum again for the next rank.

The error of encoding a sum stays on the rank that made it, per element, and is added to this rank's own part of the
next sum.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import torch
from typing_extensions import override

from collectives.base import PendingSum, SumEncoder
from collectives.payloads.base import Payload, PayloadError, shifted
from collectives.payloads.codes import Codes
from collectives.recoding import RecodingSum, by_stretch
from collectives.schedule.execution import PackedPieces, together
from collectives.schedule.rounds import Layout, Piece, leaves, stretches_between
from collectives.transport.base import ReduceOp, Transport


class RequantisingRing(RecodingSum):
    """The collective `ring` with `requantise=true` on one rank; it keeps one fp32 tensor per layer that it encodes."""

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
    """The pieces (ranges of elements) that a rank holds during a sum of codes, which it encodes again.

    Args:
        transport, payload, layout: as for `PackedPieces`.
        encoder: encodes partial sums.
        borders: the first element of each layer, and the number of elements.
        errors: what this rank adds to its contribution, fp32 [elements]; becomes the errors of what it encodes.
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
        stretches = stretches_between(self._key, self._borders, start, start + total.numel())
        encoded = self._encoder.encode(total, stretches, hop)
        encoded.subtract_from_(total)
        return encoded
