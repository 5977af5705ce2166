"""Group-TopK: the largest entries of every group of consecutive elements of the flat gradient.

Source: patent application of the Institute of Computing Technology, Chinese Academy of Sciences (2024) on distributed
training of edge devices with group-wise top-k gradients shared around a ring (preset=patent).
Differs: the defaults (preset=recommended) add error feedback, density warm-up and 16-bit values; groups start anew in
each bucket (scope=bucket), so that encoding and sending overlap with backward; indices count within their group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from typing_extensions import Doc, override

from collectives.options import Count, value_text
from collectives.payloads.base import Payload
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.group_sparse import GroupSparse
from compressors.base import Granularity, NonFiniteSum
from compressors.kernels.selection import select_groups, send_groups
from compressors.kernels.value_types import TORCH_DTYPES
from compressors.layer import Layer, Step
from compressors.topk import DensitySparsifier, num_kept

Preset = Literal["none", "patent", "recommended"]

PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "patent": {
        "error_feedback": False,
        "group_size": 256,
        "scope": "model",
        "value_dtype": "fp32",
        "warmup_epochs": 0,
    },
    "recommended": {
        "error_feedback": True,
        "group_size": 1024,
        "scope": "bucket",
        "value_dtype": "fp16",
        "warmup_epochs": 4,
    },
}


@dataclasses.dataclass(kw_only=True)
class GroupTopK(DensitySparsifier):
    """k = ratio * group_size entries of largest magnitude per group, rounded half up, at least 1; of equals the first.

    The number of entries per group is fixed, so kept zeros are sent, and blocks of whole groups carry the same load
    around a ring; only a gradient of zeros is nothing but a header. The patent drops what it does not send;
    `error_feedback` keeps it.

    scope=model lays the groups over the flat gradient of the whole model, in the order of its parameters, as the patent
    does: one bucket, which is complete only when backward ends, so nothing overlaps. Layers that the policy sends whole
    (`min_numel`, `skip`, `dense_ends`) are left out of it.

    A preset sets the defaults of other options; what you give yourself wins. preset=patent: error_feedback=false,
    group_size=256, scope=model, value_dtype=fp32, warmup_epochs=0, shared around a ring, and `bench` multiplies the
    learning rate by the number of ranks, as the patent does. preset=recommended: the defaults that hold without it.

    Bytes: 24 + z v + min(ceil(z b / 8), ceil(m / 8)) for a bucket of m elements, z kept entries of v bytes, b =
    ceil(log2(min(group_size, m))).
    """

    sends: ClassVar[type[Payload]] = GroupSparse
    granularity: ClassVar[Granularity] = "bucket"
    notices_nonfinite: ClassVar[bool] = True

    group_size: Annotated[Count, Doc("elements per group")] = 1024
    scope: Annotated[
        Literal["model", "bucket"], Doc("what the groups are laid over: the whole model's gradient, or each bucket's")
    ] = "bucket"
    preset: Annotated[Preset, Doc("patent or recommended: other defaults for several options")] = "none"
    given: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False)

    def __new__(cls, **given: Any) -> Self:
        """Note which options were given, which their values alone do not tell."""
        compressor = super().__new__(cls)
        compressor.given = frozenset(given)
        return compressor

    def __post_init__(self) -> None:
        for name, value in self._of_preset.items():
            if name not in self.given:
                setattr(self, name, value)
        super().__post_init__()

    @property
    def _of_preset(self) -> dict[str, Any]:
        return PRESETS.get(self.preset, {})

    @override
    def option_texts(self, *, only_changed: bool = False) -> dict[str, str]:
        texts = super().option_texts()
        if not only_changed:
            return texts
        defaults = type(self)(preset=self.preset).option_texts() | {"preset": "none"}
        return {name: text for name, text in texts.items() if text != defaults[name]}

    @property
    def one_bucket(self) -> bool:
        """Groups over the whole model need its gradient in one piece."""
        return self.scope == "model"

    @property
    def default_collectives(self) -> tuple[str, ...]:
        """The patent shares around a ring."""
        return ("ring",) if self.preset == "patent" else super().default_collectives

    @property
    def default_lr_scaling(self) -> str:
        """The patent multiplies the learning rate by the number of nodes."""
        return "linear" if self.preset == "patent" else super().default_lr_scaling

    @override
    def warnings(self) -> list[str]:
        sentences = super().warnings()
        if self.ratio * self.group_size < 0.5:
            sentences.append(
                f"group_topk keeps at least one entry of every {self.group_size}, so the density is not "
                f"ratio={value_text(self.ratio)}; use group_size={int(1 / self.ratio)} or more"
            )
        if self.one_bucket:
            sentences.append("scope=model makes one bucket of the whole model, so sending cannot overlap with backward")
        return sentences

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        k, last_k = self._kept(self.density(step), x.numel())
        positions = select_groups(x, self.group_size, k, last_k)
        values = to_value_dtype(x.index_select(0, positions), TORCH_DTYPES[self.value_dtype], step.world_size)
        return GroupSparse(x.numel(), self.group_size, k, values, positions.remainder(self.group_size))

    @override
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload:
        k, last_k = self._kept(self.density(step), layer.numel)
        groups, dtype = (self.group_size, k, last_k), TORCH_DTYPES[self.value_dtype]
        values, indices, positions, is_finite = send_groups(gradients, residual, left, groups, dtype, step.world_size)
        if not is_finite:
            raise NonFiniteSum
        return GroupSparse.at(positions, layer.numel, self.group_size, k, values, indices)

    def contraction_bound(self, layer: Layer) -> float:
        """1 - k / group_size, or what the short last group gives where that is more."""
        k, last_k = self._kept(self.ratio, layer.numel)
        num_whole, rest = divmod(layer.numel, self.group_size)
        shares = [k / self.group_size] * (num_whole > 0) + [last_k / max(rest, 1)] * (rest > 0)
        return self._bound_for(min(shares))

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        k, last_k = self._kept(self.ratio, layer.numel)
        num_entries = k * (layer.numel // self.group_size) + last_k
        return GroupSparse.packed_nbytes(layer.numel, self.group_size, num_entries, TORCH_DTYPES[self.value_dtype])

    def _kept(self, density: float, numel: int) -> tuple[int, int]:
        """Entries kept in a whole group, and in the short last one (0 where there is none)."""
        return num_kept(density, self.group_size), num_kept(density, numel % self.group_size)
