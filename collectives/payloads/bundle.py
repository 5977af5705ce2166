"""Bundle: several payloads in one message; UnreducedSum: the payloads of all ranks, which stand for their sum.

Body of a bundle: number of members u32 | end of each member in units of 8 bytes, u32 [members], padded to a multiple
of 8 bytes | the packed members, each padded to a multiple of 8 bytes so that its fields can be read in place.

Bytes: 16 + 8 ceil((1 + members) / 2) + sum of 8 ceil(member bytes / 8).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import struct
from collections.abc import Sequence
from typing import NoReturn, Self

import torch
from typing_extensions import override

from collectives.payloads.base import (
    HEADER_BYTES,
    Dense,
    KeepLost,
    Payload,
    PayloadError,
    Received,
    Share,
    shifted,
    unpack,
)
from collectives.payloads.codec.values import add_divided_
from collectives.payloads.fields import FLOAT_DTYPES, Field, field_nbytes


@dataclasses.dataclass(eq=False)
class Bundle(Payload):
    """A payload that sends several payloads, its members, which stand for consecutive parts of one tensor.

    Attributes:
        payloads: the members in order, at least one; if a member is itself a bundle, its members take its place.

    Raises:
        PayloadError: there are no members.
    """

    code = 9
    fixed = struct.Struct("<I")
    dtypes = FLOAT_DTYPES[:1]
    splits_blocks = True  # if the member that is cut does

    payloads: Sequence[Payload]

    def __post_init__(self) -> None:
        self.payloads = [
            member
            for payload in self.payloads
            for member in (payload.payloads if isinstance(payload, Bundle) else [payload])
        ]
        if not self.payloads:
            raise PayloadError("a bundle needs at least one payload")
        self._numels = [member.numel for member in self.payloads]
        self._offsets = [0, *itertools.accumulate(self._numels)]
        self.numel = self._offsets[-1]
        self.num_entries = sum(member.num_entries for member in self.payloads)
        self.device = self.payloads[0].device
        self.addable = all(member.addable for member in self.payloads)
        self.elementwise = all(member.elementwise for member in self.payloads) and (
            len({member.wire.dtype for member in self.payloads}) == 1
        )
        if any(member.keep_lost is not None for member in self.payloads):
            self.keep_lost = _keep_in_members([member.keep_lost for member in self.payloads], self._offsets)

    @override
    def keep_lost_with(self, keep_lost: KeepLost) -> None:
        self.keep_lost = keep_lost
        for member, offset in zip(self.payloads, self._offsets, strict=False):
            member.keep_lost = shifted(keep_lost, offset)

    @staticmethod
    def packed_nbytes(lengths: Sequence[int]) -> int:
        """Return the bytes of a packed bundle whose members have the packed lengths `lengths`, in bytes."""
        return HEADER_BYTES + padded(4 + 4 * len(lengths)) + sum(map(padded, lengths))

    @functools.cached_property
    @override
    def nbytes(self) -> int:
        return self.packed_nbytes([member.nbytes for member in self.payloads])

    @override
    def fields(self) -> list[Field]:
        members = [member.fields() for member in self.payloads]
        lengths = [sum(map(field_nbytes, fields)) for fields in members]
        fields: list[Field] = [self._prefix(lengths)]
        for of_member, length in zip(members, lengths, strict=True):
            fields += [*of_member, bytes(padded(length) - length)]
        return fields

    def _prefix(self, lengths: Sequence[int]) -> bytes:
        """Return the bytes in front of the first member in a message, given the members' packed lengths in bytes."""
        ends = list(itertools.accumulate(padded(length) // 8 for length in lengths))
        header = self._header(torch.float32, len(ends)) + struct.pack(f"<{len(ends)}I", *ends)
        return header.ljust(HEADER_BYTES + padded(4 + 4 * len(ends)), b"\0")

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Self:
        (count,) = wire.numbers
        ends = [8 * (end & 0xFFFFFFFF) for end in wire.body.tensor(count, torch.int32).tolist()]
        wire.body.tensor(padded(4 + 4 * count) - 4 - 4 * count, torch.uint8)
        packed = wire.body.message[wire.body.offset :]
        if max(ends, default=0) > packed.numel():
            raise PayloadError("a bundle is cut short: its last member ends after the message")
        payloads = []
        for begin, end in itertools.pairwise([0, *ends]):  # end < begin leaves no header, so unpack raises
            member = packed[begin:end]
            if member.numel() > 2 and int(member[2]) == cls.code:
                raise PayloadError("a bundle cannot hold another bundle")
            payloads.append(unpack(member))
        bundle = cls(payloads)
        if bundle.numel != wire.numel:
            raise PayloadError("a bundle's members do not have as many elements as its header says")
        return bundle

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        for member, part in zip(self.payloads, torch.split(dense, self._numels), strict=True):
            member.add_to_(part, divisor=divisor)

    @override
    def write_to(self, parts: Sequence[torch.Tensor], *, divisor: float, others: Sequence[Payload] = ()) -> bool:
        if others or any(part.dtype != torch.float32 for part in parts):
            return False
        borders = list(itertools.accumulate((part.numel() for part in parts), initial=0))
        for member, first, last in zip(self.payloads, self._offsets, self._offsets[1:], strict=False):
            inside = [
                part[max(first - start, 0) : last - start]
                for part, start in zip(parts, borders, strict=False)
                if start < last and first < start + part.numel()
            ]
            if inside and not member.write_to(inside, divisor=divisor):
                decoded = torch.zeros(member.numel, dtype=torch.float32, device=self.device)
                member.add_to_(decoded, divisor=divisor)
                for part, values in zip(inside, decoded.split([part.numel() for part in inside]), strict=True):
                    part.copy_(values)
        return True

    @override
    def clear_in_(self, dense: torch.Tensor) -> None:
        for member, part in zip(self.payloads, torch.split(dense, self._numels), strict=True):
            member.clear_in_(part)

    @override
    def clear_selected_in_(self, dense: torch.Tensor) -> None:
        for member, part in zip(self.payloads, torch.split(dense, self._numels), strict=True):
            member.clear_selected_in_(part)

    @override
    def shares(self, numels: Sequence[int]) -> list[Share]:
        return [share for member in members(self, numels) for share in member.shares([member.numel])]

    @functools.cached_property
    def alignment(self) -> int:
        """Return the least common multiple of the members' alignments, if every member starts at a multiple of it.

        Otherwise return `numel` (or 1 if `numel` is 0), because no regular spacing of cuts suits all members.
        """
        common = math.lcm(*(member.alignment for member in self.payloads))
        return common if all(offset % common == 0 for offset in self._offsets[:-1]) else max(1, self.numel)

    def _cut(self, start: int, stop: int) -> Payload:
        # the members in this range; the first and the last may be cut; a single member is returned without a bundle
        if start == stop:
            index = min(bisect.bisect_right(self._offsets, start), len(self.payloads)) - 1
            inside = start - self._offsets[index]
            return self.payloads[index].slice(inside, inside)
        pieces = []
        for member, offset in zip(self.payloads, self._offsets, strict=False):
            begin, end = max(start - offset, 0), min(stop - offset, member.numel)
            if begin < end:
                pieces.append(member if end - begin == member.numel else member.slice(begin, end))
        return pieces[0] if len(pieces) == 1 else Bundle(pieces)

    def _add(self, other: Payload, keep_lost: KeepLost | None) -> Bundle:
        # member by member; a payload of another kind is first cut at this bundle's borders
        pieces = members(other, self._numels)
        return Bundle(
            [
                member.add(piece, shifted(keep_lost, offset))
                for member, piece, offset in zip(self.payloads, pieces, self._offsets, strict=False)
            ]
        )

    @property
    @override
    def wire(self) -> torch.Tensor:
        if not self.elementwise:
            raise PayloadError("this bundle has no element-wise wire tensor: its members differ in kind or type")
        return torch.cat([member.wire for member in self.payloads])

    @override
    def with_wire(self, wire: torch.Tensor) -> Bundle:
        pieces = torch.split(wire, [member.wire.numel() for member in self.payloads])
        return Bundle([member.with_wire(piece) for member, piece in zip(self.payloads, pieces, strict=True)])


def members(total: Payload, numels: Sequence[int]) -> list[Payload]:
    """Cut a payload, such as the sum of a bucket of layers, into one payload per part (such as a layer).

    Args:
        total: the result of a collective: a bundle, another payload, or an unreduced sum of payloads.
        numels: number of elements of each part, in order.

    Raises:
        PayloadError: `numels` do not add up to `total.numel`, or the payload cannot be cut between two parts.
    """
    if sum(numels) != total.numel:
        raise PayloadError(f"parts of {sum(numels)} elements cannot be cut from a payload of {total.numel}")
    if len(numels) == 1:
        return [total]
    if isinstance(total, UnreducedSum):
        return [UnreducedSum(unit) for unit in zip(*(members(term, numels) for term in total.terms), strict=True)]
    if isinstance(total, Bundle) and [member.numel for member in total.payloads] == list(numels):
        return list(total.payloads)  # `slice` would return a neighbour's slice in place of an empty member
    borders = itertools.accumulate(numels, initial=0)
    return [total.slice(start, stop) for start, stop in itertools.pairwise(borders)]


def _keep_in_members(of_member: Sequence[KeepLost | None], offsets: Sequence[int]) -> KeepLost:
    """Return a callback for a bundle, which passes rounding errors to `keep_lost` of the member that was rounded."""

    def keep(start: int, values: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        index = bisect.bisect_right(offsets, start) - 1
        if values.numel() and (keep_lost := of_member[index]) is not None:
            keep_lost(start - offsets[index], values, positions)

    return keep


def padded(nbytes: int) -> int:
    """Return the bytes that a member of `nbytes` bytes takes in a bundle."""
    return -(-nbytes // 8) * 8


@dataclasses.dataclass(eq=False)
class UnreducedSum(Payload):
    """The payloads of all ranks, in rank order, which stand for their sum; this payload itself is never sent.

    Attributes:
        terms: the payloads in rank order, at least one; all have the same `numel`.

    Raises:
        PayloadError: there are no terms, or they have different lengths.
    """

    code = 0

    terms: Sequence[Payload]

    def __post_init__(self) -> None:
        if not self.terms:
            raise PayloadError("a sum needs at least one term")
        self.numel = self.terms[0].numel
        self.splits_blocks = all(term.splits_blocks for term in self.terms)
        self.alignment = math.lcm(*(term.alignment for term in self.terms))
        self.num_entries = sum(term.num_entries for term in self.terms)
        self.device = self.terms[0].device
        if len(numels := sorted({term.numel for term in self.terms})) > 1:
            raise PayloadError(f"payloads of {numels[0]} and {numels[-1]} elements cannot be added")

    @functools.cached_property
    @override
    def nbytes(self) -> int:
        return sum(term.nbytes for term in self.terms)

    @override
    def fields(self) -> NoReturn:
        raise PayloadError("an unreduced sum cannot be sent; send its merged() payload")

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> NoReturn:
        raise PayloadError("an unreduced sum is never sent")

    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        """Add (term 0 + term 1 + ...) / divisor to `dense` (mutated); the sum is computed in fp32 or wider."""
        first, *others = self.terms
        if others and first.add_all_to_(others, dense, divisor=divisor):
            return
        if dense.dtype == torch.float32 and math.frexp(divisor)[0] == 0.5:
            for term in self.terms:  # dividing by a power of two is exact, so it can come before the sum
                term.add_to_(dense, divisor=divisor)
        elif dense.dtype == torch.float32 and not dense.any():  # add to the zeros directly, without a temporary
            self.add_to_(dense)
            dense.div_(divisor)
        else:
            total = dense.new_zeros(self.numel, dtype=torch.promote_types(dense.dtype, torch.float32))
            for term in self.terms:
                term.add_to_(total)
            add_divided_(dense, total, divisor)

    @override
    def write_to(self, parts: Sequence[torch.Tensor], *, divisor: float, others: Sequence[Payload] = ()) -> bool:
        first, *later = self.terms
        return first.write_to(parts, divisor=divisor, others=[*later, *others])

    @override
    def clear_in_(self, dense: torch.Tensor) -> None:
        for term in self.terms:
            term.clear_in_(dense)

    @override
    def _cut(self, start: int, stop: int) -> UnreducedSum:
        return UnreducedSum([term.slice(start, stop) for term in self.terms])

    def merged(self, keep_lost: KeepLost | None = None) -> Payload:
        """Return the sum of the terms in rank order as one payload: of their kind if addable, otherwise dense fp32.

        If the terms are addable, `keep_lost` is called with the rounding errors of 16-bit sums.
        """
        if all(term.addable for term in self.terms):
            return functools.reduce(lambda total, term: total.add(term, keep_lost), self.terms)
        return Dense(self.to_dense())


def mean_over_senders_(total: torch.Tensor, terms: Sequence[Payload]) -> torch.Tensor:
    """Divide each element of a sum by the number of payloads that send this element, and return the sum.

    Elements that no payload sends stay zero. A zero that is sent counts like any other value, as in the code of DeMo
    (demo.py) and SparseLoCo (tplr/compress), which average values by their indices.

    Args:
        total: the sum of the terms, fp32 [numel] (mutated).
        terms: one payload per rank.
    """
    num_silent = torch.zeros_like(total)
    for term in terms:
        silent = torch.ones_like(total)
        term.clear_in_(silent)
        num_silent += silent
    return total.div_((len(terms) - num_silent).clamp_(min=1))
