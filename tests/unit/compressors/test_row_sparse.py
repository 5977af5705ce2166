"""Row-sparse: the bytes of the rows that are not zero, and a training that loses nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.bundle import Bundle
from collectives.payloads.codec.index_sets import index_set_nbytes
from collectives.payloads.group_sparse import RowSparse
from compressors.floats import NoCompression, NonZeroRows
from compressors.layer import layers_of
from gradwire.exchange.reducer import reducer_for
from tests.testing.compressor_cases import gradient, layers_of_shapes, on_ranks, reduce_once, step_at

ROWS, WIDTH, TOKENS, STEPS = 20_000, 16, 64, 4
TABLE, MATRIX, BIAS = LAYERS = layers_of_shapes((500, 8), (20, 30), (7,), kinds=("embedding", "linear", "bias"))


class HashedText(nn.Module):
    """Sums the table's rows of the hashes of a token and of a pair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [tokens, 5] for tokens, int64 [tokens]."""
        pairs = (x + 31 * x.roll(1)) * 7919 % ROWS
        logits: torch.Tensor = self.head(self.table(x) + self.table(pairs))
        return logits


def trained(compressor: NonZeroRows | NoCompression, collective: str, ranks: int) -> tuple[torch.Tensor, int, int]:
    """Return rank 0's weights and bytes sent, and the bytes of the rows that the steps' gradients had."""
    torch.manual_seed(0)
    start = HashedText()

    def rank_of(transport, bound):
        model, reducer, of_rows = copy.deepcopy(start), reducer_for(compressor), 0
        layers, parameters = layers_of(model), list(model.parameters())
        for index in range(STEPS):
            generator = torch.Generator().manual_seed(100 * index + transport.rank)
            x = torch.randint(0, ROWS, (TOKENS,), generator=generator)
            loss = nn.functional.cross_entropy(model(x), x % 5)
            gradients = [each.flatten() for each in torch.autograd.grad(loss, parameters)]
            nonzero = int(gradients[0].view(ROWS, WIDTH).any(1).sum())
            rows = 24 + 4 * WIDTH * nonzero + index_set_nbytes(nonzero, ROWS)
            of_rows += Bundle.packed_nbytes([rows, HEADER_BYTES + 4 * (5 * WIDTH + 5)])
            updates, _ = reduce_once(reducer, bound, layers, gradients, step_at(index, transport.rank, ranks))
            with torch.no_grad():
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.sub_(update.view_as(parameter))
        weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        return weights, transport.traffic["gradient"].nbytes, of_rows

    first, *others = on_ranks(ranks, collective, rank_of)
    assert all(torch.equal(first[0], other[0]) for other in others)
    return first


@pytest.mark.parametrize(
    ("collective", "ranks"),
    [
        ("allgather", 2),
        ("allgather", 3),
        ("server", 3),
        ("server:downlink=union", 3),
        ("ring", 2),
        ("ring", 3),
        ("pool", 3),
    ],
)
def test_a_training_is_that_without_compression_at_the_bytes_of_its_rows(collective: str, ranks: int) -> None:
    """Parts of a longer ring end between rows, so another rank may begin the sum of an element."""
    sparse, nbytes, of_rows = trained(NonZeroRows(), collective, ranks)
    dense, dense_nbytes, _ = trained(NoCompression(), collective, ranks)
    if (collective, ranks) == ("ring", 3):
        torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(sparse, dense)
    if collective not in ("server", "pool"):  # which answer with all elements
        assert nbytes <= dense_nbytes / 20
    assert nbytes == of_rows or (collective, ranks) != ("allgather", 2)


@pytest.mark.parametrize("nonzero", [0, 1, 37, 500])
@pytest.mark.parametrize(("value_dtype", "width"), [("fp32", 4), ("bf16", 2)])
def test_bytes_of_an_embedding(nonzero: int, value_dtype: str, width: int) -> None:
    x = torch.zeros(500, 8)
    rows = torch.randperm(500, generator=torch.Generator().manual_seed(1))[:nonzero].sort().values
    x[rows, 3] = 2.0
    payload = NonZeroRows(value_dtype=value_dtype).encode(x.view(-1), TABLE, step_at(0))  # type: ignore[arg-type]
    assert payload.rows.tolist() == rows.tolist()
    assert torch.equal(payload.to_dense().view(500, 8), x)
    assert payload.nbytes == payload.pack().numel() == 24 + nonzero * 8 * width + index_set_nbytes(nonzero, 500)
    assert index_set_nbytes(nonzero, 500) <= 63


def test_only_embeddings_are_sent_as_rows() -> None:
    reducer = reducer_for(NonZeroRows(value_dtype="fp16"))
    gradients = [gradient(layer, 0, 0) for layer in LAYERS]

    def rank_of(transport, bound):
        return reduce_once(reducer, bound, LAYERS, gradients, step_at(0))

    updates, bucket = on_ranks(1, "allgather", rank_of)[0]
    assert {each.layer.id: each.payload for each in bucket.encoded} == {0: "RowSparse", 1: "Dense", 2: "Dense"}
    assert torch.equal(updates[0], gradients[0].half().float())
    assert torch.equal(updates[1], gradients[1])
    assert RowSparse in reducer.compressor.traits.emits
