"""N-gram embedding: hashed n-grams of bytes, whose gradient is zero in most rows."""

import dataclasses
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import nn
from torch.nn import functional
from typing_extensions import Doc, override

from bench.models.base import TextModel
from collectives.options import Count

_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # odd, 2^64 / golden ratio, as a signed number
_SHIFT = 20  # the low bits of a product mix few bits of the key


@dataclasses.dataclass(kw_only=True)
class NgramEmbedding(TextModel):
    """Predicts the next byte of a text from the last few bytes: sums one row per n-gram, from a table for each n.

    For each length, a batch has at most as many n-grams as bytes, so most rows of the tables have a gradient of zero.
    Gradients are dense tensors, because DDP's buckets cannot contain sparse gradients.

    Builds 6.4 million parameters with the default options, of which 6.3 million are in the tables.
    """

    order: Annotated[int, Ge(1), Le(7), Doc("length of the longest n-gram, in bytes")] = 4
    rows: Annotated[
        Count,
        Doc("largest number of rows of a table; n-grams share rows by a hash if there are more n-grams than rows"),
    ] = 65_536
    width: Annotated[Count, Doc("numbers in a row")] = 32
    hidden: Annotated[Count, Doc("units of the hidden layer")] = 256

    @override
    def build(self, num_classes: int) -> nn.Module:
        return Ngrams(num_classes, [min(self.rows, 256**n) for n in range(1, self.order + 1)], self.width, self.hidden)


class Ngrams(nn.Module):
    """Maps bytes, int64 [n, context], to logits [n, context, num_classes].

    Args:
        num_classes: number of outputs.
        rows: number of rows of each table, in order of the n-gram's length from 1.
        width: numbers in a row.
        hidden: units of the hidden layer.
    """

    def __init__(self, num_classes: int, rows: list[int], width: int, hidden: int) -> None:
        super().__init__()
        self.rows = rows
        self.tables = nn.ModuleList(nn.Embedding(each, width) for each in rows)
        self.hidden = nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, num_classes)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, found = torch.zeros_like(x), []
        for back, (table, rows) in enumerate(zip(self.tables, self.rows, strict=True)):
            key = key + functional.pad(x, (back, -back)) * 256**back  # before the window there are zeros
            found.append(table(_row(key, rows, back + 1)))
        logits: torch.Tensor = self.out(functional.gelu(self.hidden(sum(found[1:], start=found[0]))))
        return logits


def _row(key: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    return key if rows >= 256**length else (key * _MULTIPLIER >> _SHIFT) % rows
