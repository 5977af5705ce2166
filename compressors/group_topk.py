"""Group-TopK: sends the largest entries of every group of consecutive elements of the flat gradient.

Source: patent application of the Institute of Computing Technology, Chinese Academy of Sciences (2024) on distributed
training of edge devices with group-wise top-k gradients shared around a ring (preset=patent).
Differs: the defaults (preset=recommended) add error feedback and a warm-up of the density, and send values of 2 bits in
larger groups. Groups do not cross the borders of buckets (scope=bucket), so encoding and sending overlap with backward.
Indices are relative to their group.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from typing_extensions import Doc, override

from collectives.options import Count, value_text
from collectives.payloads import GroupSparse, Payload, SparseCodes
from collectives.payloads.codec.values import to_value_dtype
from compressors.base import Granularity, PerLayer, Traits
from compressors.kernels.selection import select_groups, send_groups, sends_groups
from compressors.layer import Layer, Step
from compressors.parts.buckets import NonFinite
from compressors.parts.values import TORCH_DTYPES, CodeForm, ValueDtypeOption, Values
from compressors.sparse import Ratio, Sparsifier, WarmupEpochs, WarmupSteps, num_kept

PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "patent": {
        "error_feedback": False,
        "group_size": 256,
        "scope": "model",
        "values": "floats",
        "value_dtype": "fp32",
        "warmup_epochs": 0,
    },
    "recommended": {
        "error_feedback": True,
        "group_size": 4096,
        "scope": "bucket",
        "values": "two_magnitudes",
        "warmup_epochs": 4,
    },
}


@dataclasses.dataclass(kw_only=True)
class GroupTopK(Sparsifier):
    """Group-TopK: sends the entries of largest magnitude of every group of `group_size` elements.

    A group sends k = ratio * group_size entries, rounded half up, at least 1. Of equal magnitudes, the first are sent.
    The number k is fixed, so zeros may be sent. With floats, equal numbers of groups make messages of equal length
    around a ring. For a gradient of zeros only a header is sent. The patent drops the entries that are not sent;
    `error_feedback` keeps them.

    With scope=model the groups divide the flat gradient of the whole model, in the order of its parameters, as in the
    patent. This needs a single bucket, which is complete only when backward ends, so communication does not overlap
    with backward. Layers that are sent in fp32 (`min_numel`, `skip`, `dense_ends`) are not part of the groups.

    values=two_magnitudes sends 2 bits per value, and the gaps between positions. At a ratio of 1 % this takes 0.41 of
    the bytes of floats, with a twentieth to a sixth of the squared error of values=sigma. With error feedback the error
    stays in the residual. Collectives that cut or add payloads, such as `ring`, send 16 bits per value; `allgather`
    sends 2.

    A preset changes the defaults of other options; options that you give take precedence. preset=patent sets
    error_feedback=false, group_size=256, scope=model, values=floats, value_dtype=fp32 and warmup_epochs=0, uses
    collective `ring`, and makes `bench` multiply the learning rate by the number of ranks, as in the patent.
    preset=recommended is the same as no preset.

    Bytes: 24 + z v + min(ceil(z b / 8), ceil(m / 8)) for a bucket of m elements, with z entries of v bytes and b =
    ceil(log2(min(group_size, m))). For codes of c bits: 24 + ceil(z c / 8) + 4 per 4096 elements, or per 32 values if
    4096 elements have fewer (sigma: 16), + min(ceil(z b / 8), ceil(m / 8), ceil(z l / 8) + ceil((z + floor((m - 1) /
    2^l)) / 8)) with l = floor(log2(m / z)).
    """

    presets = PRESETS
    sends: ClassVar[type[Payload]] = GroupSparse
    granularity: ClassVar[Granularity] = "bucket"

    value_dtype: ValueDtypeOption = "fp16"
    ratio: Ratio = 0.01
    warmup_epochs: WarmupEpochs = 4
    warmup_steps: WarmupSteps = 0
    values: Annotated[
        Values,
        Doc(
            "how values are sent: two_magnitudes, sigma: codes of 2 bits; int8: of 8 bits; floats: numbers of type "
            "value_dtype, the default if value_dtype is given"
        ),
    ] = "two_magnitudes"
    group_size: Annotated[Count, Doc("elements per group")] = 4096
    scope: Annotated[
        Literal["model", "bucket"], Doc("form the groups over the whole model's gradient or over each bucket's")
    ] = "bucket"
    preset: Annotated[
        Literal["none", "patent", "recommended"],
        Doc("change the defaults of several options to those of the patent, or to the recommended ones"),
    ] = "none"

    def __post_init__(self) -> None:
        # If only one of these two options is given, it decides the other; a preset must not change that.
        if "value_dtype" in self.given and "values" not in self.given:
            self.values = "floats"
            self.given |= {"values"}
        elif "values" in self.given and self.values != "floats":
            self.given |= {"value_dtype"}
        super().__post_init__()

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        traits = dataclasses.replace(super().traits, one_bucket=self.scope == "model")
        if self.preset == "patent":  # the patent multiplies the learning rate by the number of nodes
            traits = dataclasses.replace(traits, default_collectives=("ring",), default_lr_scaling="linear")
        return traits

    @override
    def warnings(self) -> list[str]:
        notes = (
            (
                self.ratio * self.group_size < 0.5,
                f"group_topk keeps at least one entry of every {self.group_size}, so the density is not "
                f"ratio={value_text(self.ratio)}; use group_size={int(1 / self.ratio)} or more",
            ),
            (
                self.scope == "model",
                "scope=model makes one bucket of the whole model, so sending cannot overlap with backward",
            ),
            (
                self.values == "sigma",
                "values=sigma has one range for all layers of a bucket, so layers with small gradients lose most of "
                "their gradient; use values=two_magnitudes, or topk",
            ),
        )
        return [note for applies, note in notes if applies]

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        k, last_k = self._kept(self.density.at(step), x.numel())
        positions = select_groups(x, self.group_size, k, last_k)
        if isinstance(self.form, CodeForm):
            return self.form.of_groups(x.numel(), self.group_size, k, positions, x.index_select(0, positions))
        values = to_value_dtype(x.index_select(0, positions), TORCH_DTYPES[self.value_dtype], step.world_size)
        return GroupSparse(x.numel(), self.group_size, k, values, positions.remainder(self.group_size))

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
        by_steps = functools.partial(
            PerLayer.encode_bucket, self, gradients, residual, left, layers, step, screen=screen
        )
        if residual is None or left is None or not sends_groups(self.group_size, left):
            return by_steps()
        groups, numel = (self.group_size, *self._kept(self.density.at(step), left.numel())), left.numel()
        if isinstance(self.form, CodeForm):
            values, _, positions, is_finite = send_groups(gradients, residual, left, groups, None, step.world_size)
            if is_finite:
                return self.form.of_groups(numel, *groups[:2], positions, values, left)
        else:
            dtype = TORCH_DTYPES[self.value_dtype]
            values, indices, positions, is_finite = send_groups(
                gradients, residual, left, groups, dtype, step.world_size
            )
            if is_finite:
                return GroupSparse(numel, *groups[:2], values, indices).knowing(positions)
        if screen:
            raise NonFinite
        return by_steps()

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # 1 - k / group_size before rounding; or the bound of a shorter last group, if that is larger
        k, last_k = self._kept(self.ratio, layer.numel)
        num_whole, rest = divmod(layer.numel, self.group_size)
        shares = [k / self.group_size] * (num_whole > 0) + [last_k / max(rest, 1)] * (rest > 0)
        return self.form.bound_for(min(shares))

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        k, last_k = self._kept(self.ratio, layer.numel)
        num_entries = k * (layer.numel // self.group_size) + last_k
        if isinstance(self.form, CodeForm):
            return SparseCodes.packed_nbytes(layer.numel, self.group_size, num_entries, self.form.coding)
        return GroupSparse.packed_nbytes(layer.numel, self.group_size, num_entries, TORCH_DTYPES[self.value_dtype])

    def _kept(self, density: float, numel: int) -> tuple[int, int]:
        # entries to keep of a whole group, and of a shorter last group (0 if there is none)
        return num_kept(density, self.group_size), num_kept(density, numel % self.group_size)
