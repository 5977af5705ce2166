"""The native loops of selection choose what the reference path chooses."""

from __future__ import annotations

import torch

from collectives.kernels.library import reference_path
from compressors.families.sparsifier import num_kept
from compressors.kernels.selection import select_groups
from tests.testing.hard_numbers import hard_numbers
from tests.testing.loops import needs_loops

pytestmark = needs_loops


def test_the_largest_of_groups_are_the_same(cases: range) -> None:
    for seed in cases:
        x = hard_numbers(seed)
        group_size = [1, 2, 7, 64, 100, 256, 1024, 4096][seed % 8]
        ratio = [0.001, 0.01, 0.0625, 0.25, 1.0][seed % 5]
        kept = num_kept(ratio, group_size), num_kept(ratio, x.numel() % group_size)
        with reference_path():
            expected = select_groups(x, group_size, *kept)
        assert torch.equal(select_groups(x, group_size, *kept), expected), seed
