"""The serial reference of the product: orders computed by hand, and the collectives compared with it."""

from __future__ import annotations

import torch

from bench.extensions.microbenchmarks.serial import error_bound, serial_sum
from collectives import options
from collectives.base import Collective
from collectives.payloads import Dense, Sparse
from tests.testing.payloads import make

NO_OPTIONS = ("", ":path=/dev/shm")
BIG = 1e8  # in fp32, BIG + 1 == BIG


def collective(text: str) -> Collective:
    return options.build("collectives", Collective, text)


def dense(*values: float) -> Dense:
    return Dense(torch.tensor(values, dtype=torch.float32))


def test_a_ring_starts_each_chunk_on_another_rank() -> None:
    """Three ranks, one element per chunk: (x_c + x_{c+1}) + x_{c+2}."""
    payloads = [dense(BIG, BIG, BIG), dense(1, 1, 1), dense(-BIG, -BIG, -BIG)]
    total = serial_sum(collective("ring"), payloads)
    # (B + 1) - B = 0,  (1 - B) + B = 0,  (-B + B) + 1 = 1
    assert total is not None
    assert total.tolist() == [0, 0, 1]


def test_halving_doubling_first_adds_ranks_that_are_far_apart() -> None:
    """Five ranks: x_0 + x_4 first, then distance 2, then 1."""
    payloads = [dense(BIG), dense(1), dense(1), dense(0), dense(-BIG)]
    total = serial_sum(collective("halving_doubling"), payloads)
    assert total is not None
    assert total.item() == 2  # ((B - B) + 1) + (1 + 0)
    rank_order = serial_sum(collective("pool"), payloads)
    assert rank_order is not None
    assert rank_order.item() == 0  # (((B + 1) + 1) + 0) - B


def test_a_tree_adds_its_first_child_before_its_second() -> None:
    payloads = [dense(BIG), dense(-BIG), dense(1)]
    swapped = [payloads[0], payloads[2], payloads[1]]
    totals = [serial_sum(collective("tree"), each) for each in (payloads, swapped)]
    assert [total.item() for total in totals if total is not None] == [1, 0]


def test_a_hierarchy_sums_groups_first() -> None:
    payloads = [dense(BIG), dense(1), dense(-BIG), dense(1)]
    by_groups = serial_sum(collective("hierarchical:group_size=2"), payloads)
    assert by_groups is not None
    assert by_groups.item() == 0  # (B + 1) + (-B + 1)


def test_short_floats_are_rounded_at_every_hop_of_a_ring_and_once_at_a_server() -> None:
    one, small = torch.tensor([1.0]).bfloat16(), torch.tensor([2.0**-9]).bfloat16()
    payloads = [Dense(one), Dense(small), Dense(small)]
    ring, server = (serial_sum(collective(name), payloads) for name in ("ring", "server"))
    assert ring is not None
    assert server is not None
    assert (ring.item(), server.item()) == (1.0, 1.0)  # 1 + 2^-8 is a tie and rounds to the even neighbour
    payloads = [*payloads, Dense(small)]
    ring, server = (serial_sum(collective(name), payloads) for name in ("ring", "server"))
    assert ring is not None
    assert server is not None
    assert (ring.item(), server.item()) == (1.0, 1 + 2.0**-7)


def test_what_has_no_documented_order_is_left_to_the_bound() -> None:
    assert serial_sum(collective("native"), [dense(1), dense(2)]) is None
    assert serial_sum(collective("hierarchical:intra=native"), [dense(1), dense(2)]) is None
    assert serial_sum(collective("hierarchical:inter=native"), [dense(1)] * 3) is None
    codes = [make("codes-sign", 9, torch.float32, seed).payload for seed in range(2)]
    assert serial_sum(collective("server:downlink=recode"), codes) is None
    assert serial_sum(collective("server:downlink=recode"), [dense(1), dense(2)]) is not None
    assert serial_sum(collective("allgather"), codes) is not None


def test_the_bound_is_zero_for_integers_and_grows_with_ranks_magnitude_and_roundoff() -> None:
    integers = [Dense(torch.tensor([3, -4])), Dense(torch.tensor([1, 1]))]
    exact, bound = error_bound(integers)
    assert exact.tolist() == [4, -3]
    assert bound.tolist() == [0, 0]
    floats = [dense(3), dense(-4), dense(1)]
    assert error_bound(floats)[0].item() == 0
    assert error_bound(floats)[1].item() == 3 * 2.0**-24 * 8
    halves = [Sparse(2, torch.tensor([1]), torch.tensor([2.0]).half()) for _ in range(2)]
    assert error_bound(halves)[1].tolist() == [0, 2 * 2.0**-11 * 4]


def test_a_hierarchy_goes_by_what_its_parts_are_and_not_by_how_they_are_written() -> None:
    codes = [make("codes-sign", 9, torch.float32, seed).payload for seed in range(4)]
    named = [
        serial_sum(collective(f"hierarchical:intra=pool{options},inter=allgather"), codes) for options in NO_OPTIONS
    ]
    assert named[0] is not None
    assert named[1] is not None
    assert torch.equal(*(total for total in named if total is not None))
