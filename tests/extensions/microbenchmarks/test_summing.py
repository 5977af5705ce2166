"""The check of a sum: wrong elements are counted, against the serial sum or within the error bound."""

from __future__ import annotations

import torch

from bench.extensions.microbenchmarks.collectives_worker import expected_sum, num_wrong
from collectives.allreduce import Native, Ring
from collectives.payloads import Dense
from collectives.payloads.base import Payload
from collectives.transport.base import Ledger, Traffic


def payloads() -> list[Payload]:
    return [Dense(torch.tensor([1.0, 2.0, 3.0, 4.0])), Dense(torch.tensor([0.5, 0.5, 0.5, 0.5]))]


def test_a_documented_order_allows_no_difference() -> None:
    expected = expected_sum(Ring(), payloads())
    right = torch.tensor([1.5, 2.5, 3.5, 4.5])
    assert num_wrong(right, *expected) == 0
    assert num_wrong(right + torch.tensor([0, 2.0**-22, 0, 1]), *expected) == 2
    assert num_wrong(torch.full((4,), torch.nan), *expected) == 4


def test_the_backends_order_may_differ_by_its_bound() -> None:
    expected = expected_sum(Native(), payloads())
    right = torch.tensor([1.5, 2.5, 3.5, 4.5])
    assert num_wrong(torch.nextafter(right, torch.tensor(torch.inf)), *expected) == 0
    assert num_wrong(right * (1 + 2.0**-21), *expected) == 4
    assert num_wrong(torch.tensor([1.5, torch.nan, torch.inf, 4.5]), *expected) == 2


def test_what_was_sent_counts_every_purpose() -> None:
    ledger = Ledger()
    ledger.book(100, messages=2)
    before = sum(ledger.traffic.values(), Traffic())
    ledger.book(30)
    ledger.purpose = "control"
    ledger.book(8)
    assert sum(ledger.traffic.values(), Traffic()).since(before) == Traffic(messages=2, nbytes=38)
    ledger.book(5, from_formula=True)
    assert sum(ledger.traffic.values(), Traffic()).from_formula
