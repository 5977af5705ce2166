"""Row-sparse: sends the rows of embeddings whose gradient is not zero, and all other layers in fp32.

Source: `row_sparse` gradients of embeddings in Apache MXNet's KVStore; sparse gradients of `torch.nn.Embedding`.
Differs: backward makes a dense gradient, whose rows of zeros are found here and not sent.
"""

import dataclasses
import functools
from typing import Annotated, ClassVar

import torch
from typing_extensions import Doc, override

from collectives.payloads import Dense, Payload, RowSparse
from collectives.payloads.codec.values import to_value_dtype
from compressors.base import PerLayer, Traits
from compressors.layer import Layer, Step
from compressors.parts.values import TORCH_DTYPES, ValueDtype, roundoff


@dataclasses.dataclass(kw_only=True)
class NonZeroRows(PerLayer, name="row_sparse"):
    """Row-sparse: sends the rows of embeddings whose gradient is not zero, and all other layers in fp32.

    A batch changes the rows of its tokens only, so this loses nothing (with value_dtype=fp32) and saves much where an
    embedding has many more rows than a batch has tokens. It saves nothing where every row gets a gradient, as with tied
    weights.

    Bytes: 24 + z w v + the cheapest coding of z row numbers (at most rows / 8), per embedding with rows of w elements,
    of which z are not zero; 16 + 4 m for all other layers together.
    """

    sends: ClassVar[type[Payload]] = RowSparse
    biased: ClassVar[bool] = False

    value_dtype: Annotated[ValueDtype, Doc("type of the rows' values on the wire")] = "fp32"

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, emits=frozenset({RowSparse, Dense}))

    @override
    def leaves_dense(self, layer: Layer) -> bool:
        return layer.kind != "embedding"

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> RowSparse:
        matrix = x.view(layer.shape[0], -1)
        rows = matrix.any(1).nonzero().view(-1)
        values = to_value_dtype(matrix[rows], TORCH_DTYPES[self.value_dtype], step.world_size)
        return RowSparse(x.numel(), rows, values)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return roundoff(self.value_dtype) ** 2

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return None  # as many rows as are not zero
