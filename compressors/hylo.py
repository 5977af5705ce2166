"""Hylo: sends whole filters of convolutions, two bits per element of linear layers, and the rest in fp32.

Source: "Hylo: a hybrid layer-based optimization to reduce communication in distributed deep learning" (the abstract:
layers above a size threshold are treated by type. Of a convolution only important filters are sent, at a rate that
falls with the layer's size. Of a fully connected layer two bits per element are sent, with a threshold that follows the
layer's gradients. What is not sent accumulates); the two-bit layout of Apache MXNet's gradient compression.
Differs: the abstract gives no formulas. Here the rate is (min_numel / m)^exponent, importance is the l1 norm, and the
threshold is the mean magnitude; a code is decoded as the mean magnitude of the elements that reach the threshold.
Attention matrices are fully connected layers, so they take two bits. Rows of an embedding are treated as filters,
because a batch changes only the rows of its tokens, as a whole; rows of zeros are not sent.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from typing_extensions import Doc, override

from collectives.base import Collective
from collectives.options import CountOrZero, Incompatible, OptionError, PositiveOrZero
from collectives.payloads import Codes, Dense, Payload, RowSparse
from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.codec.philox import random_words, uniform
from collectives.payloads.codec.values import to_value_dtype
from compressors.base import ErrorFeedback, MinNumel, Traits
from compressors.kernels.quantisation import CODES, LEVELS, level_dtype, ternary, ternary_and_mean
from compressors.kernels.residuals import add_and_measure
from compressors.kernels.selection import magnitudes_and_largest, top_k
from compressors.layer import Layer, Step, seed_for
from compressors.parts.buckets import each_layer
from compressors.parts.values import TORCH_DTYPES, ValueDtype, roundoff
from compressors.quantizers import SharedScale
from compressors.sparse import num_kept

Importance = Literal["l1", "l2", "taylor", "random"]


@dataclasses.dataclass(kw_only=True)
class Hylo(SharedScale):
    """Hylo: compresses layers of more than `min_numel` elements according to their kind.

    A convolution with F filters sends k = rate * F whole filters, with rate = (min_numel / m)^exponent, at least
    min_rate. An embedding with F rows sends k rows, or fewer if fewer are not zero. A fully connected layer, also in
    attention, sends a code per element: x >= t, x <= -t, or neither, with t = gamma * mean|x|; `decode` sets the value
    of a code. gamma is at most 1, because a flat gradient would never reach a larger threshold. With threshold=0 the
    threshold is adaptive; any other value is a fixed threshold, as in MXNet.

    Bytes: per layer of m elements. Convolution: 24 + k (m / F) v + filter numbers (at most F / 8), with v bytes per
    value, if the filter axis is 0. Embedding: at most as much. Fully connected: 28 + m / 4, or 16 + m with
    shared_threshold (up to 127 ranks, plus 8 control bytes). All other layers together: 16 + 4 m.

    Raises:
        OptionError: options contradict each other.
    """

    combine: ClassVar[Literal["max", "mean"]] = "mean"

    error_feedback: ErrorFeedback = True
    min_numel: MinNumel = 16384
    exponent: Annotated[float, Ge(0), Le(4), Doc("how fast a convolution's rate falls with its size")] = 0.5
    min_rate: Annotated[float, Gt(0), Le(1), Doc("smallest share of a convolution's filters to send")] = 0.05
    importance: Annotated[Importance, Doc("score of a filter; taylor is sum|weight * gradient|")] = "l1"
    value_dtype: Annotated[ValueDtype, Doc("type of the filters' values on the wire")] = "fp32"
    max_age: Annotated[
        CountOrZero, Doc("send a filter that was not sent for this many steps, whatever its score; 0: never")
    ] = 0
    gamma: Annotated[float, Gt(0), Le(1), Doc("threshold / mean magnitude of a fully connected layer")] = 1.0
    threshold: Annotated[PositiveOrZero, Doc("fixed threshold in units of the gradient; 0: adaptive")] = 0.0
    pow2_threshold: Annotated[bool, Doc("round the threshold down to a power of two: residuals are then exact")] = False
    decode: Annotated[
        Literal["auto", "threshold", "mean_selected"],
        Doc(
            "value of a code: the threshold, or the mean magnitude of the elements that reach it; auto: the mean, "
            "unless the threshold is fixed, shared or a power of two"
        ),
    ] = "auto"
    shared_threshold: Annotated[
        bool, Doc("use the mean threshold of all ranks: sums are then integers of 8 bits, which suit collective ring")
    ] = False
    fc_like: Annotated[bool, Doc("treat every other matrix as fully connected")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold and self.gamma != 1:
            raise OptionError("hylo: gamma has no effect with a fixed threshold; leave one of them out")
        if self.shared_threshold and self.decode == "mean_selected":
            raise OptionError(
                "hylo: decode=mean_selected gives each rank its own value, which shared_threshold=true does not allow; "
                "leave out one of them"
            )

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        emits: set[type[Payload]] = {RowSparse, Dense} if self.shared_threshold else {RowSparse, Dense, Codes}
        return dataclasses.replace(super().traits, emits=frozenset(emits), needs_all_ranks=self.shared_threshold)

    @override
    def kind_for(self, layer: Layer) -> type[Payload]:
        if layer.filter_axis is None:
            return super().kind_for(layer)
        return Dense if self._num_filters_kept(layer) == _num_filters(layer) else RowSparse

    @override
    def check_compatible(self, collective: Collective, layers: Sequence[Layer] = ()) -> None:
        super().check_compatible(collective, layers)
        for layer in layers:
            sends_filters = layer.filter_axis is not None and not self.leaves_dense(layer)
            if sends_filters and layer.weight is not None and not layer.weight.is_contiguous():
                raise Incompatible(
                    f"hylo: the filters of {layer.name} are interleaved (channels_last); use torch.contiguous_format"
                )

    @override
    def leaves_dense(self, layer: Layer) -> bool:
        is_matrix = self.fc_like and layer.kind == "other" and len(layer.shape) == 2
        is_linear = layer.kind in ("linear", "attention") or is_matrix
        return super().leaves_dense(layer) or (layer.filter_axis is None and not is_linear)

    def rate(self, layer: Layer) -> float:
        """Return the share of a layer's filters (or rows) to send, in [min_rate, 1]; smaller for larger layers."""
        return min(max(math.pow(self.min_numel / layer.numel, self.exponent), self.min_rate), 1.0)

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        if layer.filter_axis is not None:
            return self._encode_filters(x, layer, step)
        if self.shared_threshold:
            agreed = step.memory.scales[layer.id]
            levels = ternary(x, agreed, LEVELS) if agreed else torch.zeros_like(x)
            return Dense(levels.to(level_dtype(step.world_size)))
        return self._encode_codes(x, self.local_scale(x))

    @override
    def encode_bucket(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool = False,
    ) -> Payload:
        if residual is None or left is None or self.shared_threshold or self.threshold:
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)

        def encode(gradient: torch.Tensor, residual: torch.Tensor, left: torch.Tensor, layer: Layer) -> Payload:
            if layer.filter_axis is not None:
                return by_steps([gradient], residual, left, [layer], step, screen=screen)
            payload = self._encode_codes(left, self._adaptive(left, *add_and_measure(gradient, residual, left)))
            payload.subtract_from_(left)
            return payload

        by_steps = super().encode_bucket
        return each_layer(encode, gradients, residual, left, layers, screen=screen)

    def contraction_bound(self, layer: Layer) -> float:
        """Return 1 minus a lower bound of the share of |x|^2 that is sent.

        Convolutions: for k of F filters with f elements each, this share is k / F by l2 norm or at random. By l1 norm
        it is k / (k + (F - k) f), because a filter that is sent holds at least 1 / f of the square of its l1 norm, and
        a filter that is not sent holds at most that square. It is 0 with importance=taylor, because weights may be
        zero, and with `max_age`, because old filters may take all places.

        Fully connected layers: for m codes the share is gamma / m. A coded element gains at least t |x|, the largest
        element is coded, and gamma |x|_1 max|x| / m >= gamma |x|^2 / m. The share is half of that if t is rounded down
        to a power of two. Decoding to the mean is no worse than decoding to t. The share is 0 for a fixed or shared
        threshold, because it may be that no element reaches it.
        """
        if layer.filter_axis is None:
            if self.threshold or self.shared_threshold:
                return 1.0
            return 1 - self.gamma / layer.numel / (2 if self.pow2_threshold else 1)
        filters, kept = _num_filters(layer), self._num_filters_kept(layer)
        left = (filters - kept) * (layer.numel // filters if self.importance == "l1" else 1)
        unbounded = left and (self.max_age or self.importance == "taylor")
        return 1 - (0.0 if unbounded else kept / (kept + left)) * (1 - roundoff(self.value_dtype) ** 2)

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        if layer.filter_axis is None:  # shared levels have 8 bits, for up to 127 ranks
            return HEADER_BYTES + layer.numel if self.shared_threshold else Codes.packed_nbytes(layer.numel, 2)
        dtype = TORCH_DTYPES[self.value_dtype]
        if self.kind_for(layer) is Dense:
            return HEADER_BYTES + dtype.itemsize * layer.numel
        if layer.kind == "embedding":
            return None  # it depends on how many of the k rows are not zero
        rows, row_numel = _rows_per_filter(layer)
        return RowSparse.packed_nbytes(layer.numel, row_numel, rows * self._num_filters_kept(layer), dtype)

    @override
    def shares_scale(self, layer: Layer) -> bool:
        return self.shared_threshold and layer.filter_axis is None

    def local_scale(self, x: torch.Tensor) -> torch.Tensor:
        """Return the threshold for `x`, fp32 [1]: gamma * mean|x|, but at most max|x| in spite of rounding."""
        if self.threshold:
            return x.new_full((1,), self.threshold)
        return self._adaptive(x, *magnitudes_and_largest(x))

    @override
    def rounded_scale(self, scale: torch.Tensor) -> torch.Tensor:
        if not self.pow2_threshold:
            return scale
        mantissa, _ = torch.frexp(scale)
        return torch.where(scale > 0, scale / (2 * mantissa), scale)

    def _adaptive(self, x: torch.Tensor, total: float, largest: float) -> torch.Tensor:
        # the threshold for `x`; `total` and `largest` are the sum and the maximum of its magnitudes
        return x.new_tensor([total / x.numel() * self.gamma]).clamp_(max=largest)

    def _encode_codes(self, x: torch.Tensor, threshold: torch.Tensor) -> Payload:
        threshold = self.rounded_scale(threshold)
        # Codes that are decoded to the mean halve the residual of real gradients.
        is_fixed = self.threshold or self.shared_threshold or self.pow2_threshold
        if self.decode == "threshold" or (self.decode == "auto" and is_fixed):
            return Codes(x.numel(), "ternary", CODES, ternary(x, float(threshold), CODES), threshold)
        codes, mean = ternary_and_mean(x, float(threshold))
        return Codes(x.numel(), "ternary", CODES, codes, x.new_tensor([mean]))

    def _num_filters_kept(self, layer: Layer) -> int:
        return num_kept(self.rate(layer), _num_filters(layer))

    def _encode_filters(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        dtype = TORCH_DTYPES[self.value_dtype]
        if self.kind_for(layer) is Dense:
            return Dense(to_value_dtype(x, dtype, step.world_size).clone())
        chosen = self._choose_filters(x, layer, step)
        rows_per_filter, row_numel = _rows_per_filter(layer)
        firsts = torch.arange(rows_per_filter, device=x.device).unsqueeze(1) * _num_filters(layer)
        rows = (firsts + chosen).view(-1)
        if layer.kind == "embedding":
            rows = rows[x.view(-1, row_numel)[rows].any(1)]
        return RowSparse(x.numel(), rows, to_value_dtype(x.view(-1, row_numel)[rows], dtype, step.world_size))

    def _choose_filters(self, x: torch.Tensor, layer: Layer, step: Step) -> torch.Tensor:
        """Return the ascending numbers of the filters to send; record for how many steps the other filters have waited.

        Of filters with equal scores, those with lower numbers are sent.
        """
        scores, k = self._scores(x, layer, step), self._num_filters_kept(layer)
        is_zero = torch.zeros_like(scores, dtype=torch.bool)
        if layer.kind == "embedding":  # a row of zeros has nothing to send, so it does not wait either
            is_zero = ~x.view(scores.numel(), -1).any(1)
            scores = scores.masked_fill(is_zero, 0.0)
        if not self.max_age:
            return top_k(scores, k)
        ages = step.memory.get("ages", layer.id)
        ages = torch.zeros_like(scores) if ages is None else ages.to(scores.device)
        waited = (ages >= self.max_age) & ~is_zero
        # If more filters wait than can be sent, send the oldest of them, because others might never be sent.
        too_many = int(waited.sum()) > k
        chosen = top_k(torch.where(waited, ages, 0.0) if too_many else torch.where(waited, torch.inf, scores), k)
        step.memory.propose("ages", layer.id, (ages + 1).index_fill_(0, chosen, 0))
        return chosen

    def _scores(self, x: torch.Tensor, layer: Layer, step: Step) -> torch.Tensor:
        # fp32 [num_filters], >= 0
        rows_per_filter, row_numel = _rows_per_filter(layer)
        filters = x.view(rows_per_filter, -1, row_numel)
        if self.importance == "random":
            return uniform(random_words(seed_for(layer, step, per_rank=True), filters.shape[1], x.device))
        if self.importance == "l2":
            norms: torch.Tensor = torch.linalg.vector_norm(filters, dim=(0, 2), dtype=torch.float64)
            return norms.float()
        if self.importance == "taylor":
            if layer.weight is None:
                raise ValueError(f"hylo: importance=taylor needs the weight of {layer.name}")
            filters = layer.weight.detach().float().view_as(filters) * filters
        return filters.abs().sum((0, 2))


def _num_filters(layer: Layer) -> int:
    assert layer.filter_axis is not None
    return layer.shape[layer.filter_axis]


def _rows_per_filter(layer: Layer) -> tuple[int, int]:
    """Return the number of contiguous pieces of memory (rows) per filter or embedding row, and the length of a piece.

    A filter is one row of a weight [filters, ...]. In a transposed weight [inputs, filters, ...], it is one row per
    input.
    """
    rows = math.prod(layer.shape[: layer.filter_axis])
    return rows, layer.numel // (rows * _num_filters(layer))
