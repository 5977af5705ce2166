"""The collectives under test, and the checks of every sum, over any transport."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch

from collectives import options
from collectives.base import Collective
from collectives.options import incompatibility
from collectives.payloads import Bundle
from collectives.payloads.base import Payload
from collectives.schedule.rounds import leaves

serial_sum = pytest.importorskip("bench.extensions.microbenchmarks.serial").serial_sum
TEXTS = [
    *options.component_names("collectives", Collective),
    "tree:segment_bytes=4000",
    "server:downlink=union",
    "server:placement=sharded,split_numel=100",
    "server:placement=sharded,downlink=union",
    "hierarchical:group_size=3,intra=server,inter=tree",
    "hierarchical:intra=allgather,inter=allgather",
    "hierarchical:intra=halving_doubling,inter=native",
    "hierarchical:group_size=3,intra=pool",
    "pool:slot_bytes=4096",
    "pool:slot_bytes=65536,coherent=false",
    "pool:slot_bytes=4096,regions=3",
]
COLLECTIVES: dict[str, Callable[[], Collective]] = {
    text: functools.partial(options.build, "collectives", Collective, text) for text in TEXTS
}
"""Every collective, some also with other options."""
Result = tuple[torch.Tensor, int]
"""(decoded total, bytes sent) on one rank."""


def key_of(payload: Payload) -> tuple[int, ...]:
    return tuple(range(3, 3 + len(leaves(payload))))


def refusal(collective: Collective, payload: Payload) -> str | None:
    checked = (incompatibility(collective.check_compatible, type(leaf)) for leaf in leaves(payload))
    return next(filter(None, checked), None)


def check(name: str, contributions: Sequence[Payload], results: Sequence[Result], itemsize: int = 4) -> None:
    """Check that every rank has the serial reference's total bit for bit, and that the bytes match the formulas."""
    collective, world_size = COLLECTIVES[name](), len(contributions)
    expected = serial_sum(collective, contributions)
    assert expected is not None or "native" in name  # the backend chooses the order
    first = results[0][0]
    if expected is None:
        assert_within_rounding(first, contributions)
    else:
        torch.testing.assert_close(first, expected, rtol=0, atol=0)
    for rank, (total, sent) in enumerate(results):
        assert torch.equal(total, first), f"rank {rank} differs"
        nbytes, elementwise = carried_bytes(collective, contributions[rank]), contributions[0].elementwise
        formula = collective.expected_bytes(nbytes, world_size, rank, elementwise=elementwise, itemsize=itemsize)
        assert formula is None or sent == round(formula), f"rank {rank}"


def carried_bytes(collective: Collective, payload: Payload) -> int:
    """Return the bytes of a payload as it is sent: packed, or only its wire tensors."""
    if collective.carries_wires and all(leaf.elementwise for leaf in leaves(payload)):
        return sum(leaf.wire.nbytes for leaf in leaves(payload))
    return payload.nbytes


def clone(payload: Payload) -> Payload:
    """Return a copy whose tensors a collective may overwrite."""
    if isinstance(payload, Bundle):
        return Bundle([clone(member) for member in payload.payloads])
    return payload.with_wire(payload.wire.clone()) if payload.elementwise else payload


def assert_within_rounding(total: torch.Tensor, contributions: Sequence[Payload]) -> None:
    """Check the error bound for any order of additions: (n - 1) u sum |x|, up to second order."""
    terms = torch.stack([payload.to_dense().double() for payload in contributions])
    bound = 1.01 * (len(contributions) - 1) * 2**-24 * terms.abs().sum(0)
    assert ((total.double() - terms.sum(0)).abs() <= bound).all()
