"""Random-k: sends entries at random positions that all ranks share, so no index is sent."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from typing_extensions import Doc, override

from collectives.kernels.loop import Float, FloatArray, Int, LongArray, Loop, array
from collectives.options import OptionError, value_text
from collectives.payloads import Payload, Seeded
from collectives.payloads.codec.philox import check_numel, marks_for, seeded_positions
from collectives.payloads.codec.values import to_value_dtype, value_limit
from compressors.base import PerLayer
from compressors.kernels.selection import TYPES
from compressors.layer import Layer, Step, seed_for
from compressors.parts.buckets import each_layer
from compressors.parts.values import TORCH_DTYPES, ValueDtypeOption, roundoff
from compressors.sparse import Ratio, Sparsifier, WarmupEpochs, WarmupSteps, num_kept

_SEND_AT = Loop(
    "send_at", FloatArray, FloatArray, Int, Int, LongArray, Int, Int, Int, Float, array(*TYPES), FloatArray, returns=Int
)
_SEND_DRAWN = Loop(
    "send_drawn", FloatArray, FloatArray, Int, Int, Int, LongArray, LongArray, Int, Float, array(*TYPES), FloatArray
)


def send_drawn(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    left: torch.Tensor,
    seed: int,
    world_size: int,
    values: torch.Tensor,
) -> torch.Tensor:
    """Write the entries of x = gradient + residual at random positions to `values`, and the rest of x to `left`.

    Return the positions, int64 [count], ascending. All tensors lie on the CPU.

    Args:
        gradient: fp32 [numel], contiguous.
        residual: fp32 [numel].
        left: fp32 [numel], overwritten with x minus the sent values; must not share memory with the other tensors.
        seed: seed of the positions, 0..2^64 - 1.
        world_size: number of ranks over which the values are summed; fp16 values are limited so that no sum overflows.
        values: [count], contiguous, overwritten with the selected entries; fp32, fp16 or bf16.
    """
    numel, count, dtype = gradient.numel(), values.numel(), values.dtype
    check_numel(numel)
    kind, limit = TYPES.index(dtype), value_limit(dtype, world_size)
    if (marks := marks_for(numel, count)) is None:
        positions = seeded_positions(numel, count, seed)
        _SEND_AT(gradient, residual, 0, numel, positions, 0, count, kind, limit, values, left)
        return positions
    positions = torch.empty(count, dtype=torch.int64)
    _SEND_DRAWN(gradient, residual, numel, count, seed, marks, positions, kind, limit, values, left)
    return positions


@dataclasses.dataclass(kw_only=True)
class RandomK(Sparsifier):
    """Random-k: sends entries at random positions that all ranks share, so no index is sent.

    Source: Stich, Cordonnier, Jaggi 2018 (arXiv:1809.07599), with error feedback; scaled and unbiased: Wangni et al.
    2018 (arXiv:1710.09854).

    At every step, k = ratio * m positions are drawn without replacement per layer of m elements.

    With error feedback the values are sent as they are. Without error feedback, the expectation of the update is k / m
    times the gradient; scaled=true multiplies the values by m / k, so the update is unbiased, with a variance of
    m / k - 1.

    Bytes: 24 + k v per layer, with v bytes per value.

    Raises:
        OptionError: both scaled and error_feedback are true.
    """

    sends: ClassVar[type[Payload]] = Seeded

    value_dtype: ValueDtypeOption = "fp16"
    ratio: Ratio = 0.25
    warmup_epochs: WarmupEpochs = 4
    warmup_steps: WarmupSteps = 0
    scaled: Annotated[bool, Doc("multiply the values by m / k, so that the update is unbiased")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scaled and self.error_feedback:
            raise OptionError(
                "randomk: scaled=true needs error_feedback=false, because scaled values are no contraction"
            )

    @override
    def warnings(self) -> list[str]:
        notes = (
            (
                not (self.scaled or self.error_feedback),
                "randomk without scaling or error feedback shrinks the update; use scaled=true or error_feedback=true",
            ),
            (
                self.error_feedback and self.ratio < 0.2 and not self.momentum_correction,
                f"randomk with ratio={value_text(self.ratio)} sends an element every {round(1 / self.ratio)} steps, "
                "so training with momentum can diverge; use momentum_correction=true or a larger ratio",
            ),
        )
        return [note for applies, note in notes if applies]

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
        if residual is None or left is None or not _SEND_DRAWN.serves(left):
            return PerLayer.encode_bucket(self, gradients, residual, left, layers, step, screen=screen)

        def encode(gradient: torch.Tensor, residual: torch.Tensor, left: torch.Tensor, layer: Layer) -> Seeded:
            seed, count = self._seed_and_count(layer, step)
            values = Seeded.room(count, TORCH_DTYPES[self.value_dtype], left.device)
            positions = send_drawn(gradient, residual, left, seed, step.world_size, values)
            return Seeded(layer.numel, seed, values).knowing(positions)

        return each_layer(encode, gradients, residual, left, layers, screen=screen)

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        seed, count = self._seed_and_count(layer, step)
        positions = seeded_positions(x.numel(), count, seed).to(x.device)
        values = x[positions]
        if self.scaled:
            values.mul_(x.numel() / values.numel())
        values = to_value_dtype(values, TORCH_DTYPES[self.value_dtype], step.world_size)
        return Seeded(x.numel(), seed, values).knowing(positions)

    def _seed_and_count(self, layer: Layer, step: Step) -> tuple[int, int]:
        # the seed of this step's positions, which all ranks share, and the number of positions
        return seed_for(layer, step, per_rank=False), self.num_kept(layer, step)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # 1 - k / m, or m / k - 1 if scaled, before rounding; both hold in expectation.
        share = num_kept(self.ratio, layer.numel) / layer.numel
        if self.scaled:
            return share * ((1 + roundoff(self.value_dtype)) / share - 1) ** 2 + 1 - share
        return self.form.bound_for(share)

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Seeded.packed_nbytes(num_kept(self.ratio, layer.numel), TORCH_DTYPES[self.value_dtype])
