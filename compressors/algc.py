"""ALGC: sends the largest entries of every large layer, by a density and a threshold that adapt per layer.

Source: "Adaptive layered gradient compression with parameter server", Journal of Hubei Minzu University (Natural
Science) 43(1), 2025, 34-40, doi:10.13501/j.cnki.42-1908/n.2025.03.005 (the abstract: layers above a size threshold are
compressed, each with a sparsity threshold that is adjusted during training; the server adds gradients and residuals).
Differs: the abstract gives no formulas. Here the layers share a budget of entries in proportion to their root mean
squares, and a multiplicative controller adjusts the threshold to the density. A density outside [1/2, 2] times the
target is corrected in the same step, and values have 16 bits on the wire. For attention matrices and embeddings only
the size counts, as for all layers in the abstract.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc, override

from collectives.options import MOST, Count, CountOrZero, OptionError, Positive, PositiveOrZero, value_text
from collectives.payloads import Dense, Payload, Sparse
from compressors.base import MinNumel, PerLayer, Traits
from compressors.kernels.residuals import LargeEntries, add_and_find, find
from compressors.kernels.selection import magnitudes, reaching, top_k
from compressors.layer import Layer, Memory, Step
from compressors.parts.buckets import NonFinite, each_layer
from compressors.parts.values import TORCH_DTYPES, ValueDtypeOption
from compressors.sparse import Ratio, Sparsifier, WarmupEpochs, WarmupSteps, num_kept

DEFAULT_MIN_NUMEL = 8192
CONTROL = "control"  # state per layer: threshold, moving average of the root mean square, number of elements
WINDOW = 2.0  # if the density differs from the target by more than this factor, the exact threshold is computed
SMALLEST = 2.0**-149  # the smallest positive fp32 number


@dataclasses.dataclass(kw_only=True)
class Algc(Sparsifier):
    """ALGC: sends the entries of large layers that reach an adaptive threshold, and small layers in fp32.

    The target density of layer l is ratio * rms_l / (mean rms, weighted by size), between min_ratio and max_ratio. So
    layers with larger gradients send more, within a total of ratio * (all elements) entries. After each step, the
    threshold is multiplied by (density / target)^gain. The threshold is exact (that of top-k) in the first step, in
    every `refresh`-th step, and if the density differs from the target by more than a factor of 2.

    Bytes: 16 + min over index codings (z v + indices) per compressed layer, for z entries of v bytes, z between half
    and twice the target; 16 + 4 m for all other layers together.

    Raises:
        OptionError: min_numel_of is malformed, min_ratio is above max_ratio, or both link_bps and min_numel are given.
    """

    sends: ClassVar[type[Payload]] = Sparse

    value_dtype: ValueDtypeOption = "fp16"
    ratio: Ratio = 0.01
    warmup_epochs: WarmupEpochs = 4
    warmup_steps: WarmupSteps = 0
    min_numel: MinNumel = DEFAULT_MIN_NUMEL
    min_numel_of: Annotated[
        tuple[str, ...],
        Doc("min_numel by prefix of the layer's name, such as conv1:4096+fc:1024; the longest match counts"),
    ] = ()
    min_ratio: Annotated[float, Gt(0), Le(1), Doc("smallest density of a layer")] = 1e-3
    max_ratio: Annotated[float, Gt(0), Le(1), Doc("largest density of a layer once warm-up is over")] = 0.25
    gain: Annotated[
        float, Ge(0), Lt(0.25), Doc("exponent of the controller that adjusts the threshold to the density")
    ] = 0.05
    ema: Annotated[
        float, Ge(0), Lt(1), Doc("weight of the past in the moving average of a layer's root mean square")
    ] = 0.9
    refresh: Annotated[Count, Doc("compute the exact threshold every this many steps")] = 100
    threshold: Annotated[Literal["track", "exact"], Doc("exact: top-k with the layer's density at every step")] = (
        "track"
    )
    flush_every: Annotated[CountOrZero, Doc("send the residuals in full every this many steps; 0: never")] = 0
    link_bps: Annotated[PositiveOrZero, Doc("choose min_numel for a link of this speed; 0: use min_numel")] = 0.0
    compress_s: Annotated[PositiveOrZero, Doc("for link_bps: fixed seconds to compress a layer")] = 3e-4
    compress_per_s: Annotated[Positive, Doc("for link_bps: elements compressed per second")] = 3e8

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.min_numel_of:
            if not re.fullmatch(r"[^:]+:\d{1,18}", text):
                raise OptionError(
                    f"algc: min_numel_of={text} is not possible; write the prefix of a name and a size, such as fc:1024"
                )
        if self.min_ratio > self.max_ratio:
            raise OptionError("algc: min_ratio must be at most max_ratio; lower it, or raise max_ratio")
        if self.link_bps:
            # For m elements, compressing takes compress_s + m / compress_per_s and saves m (4 - ratio (v + 4)) bytes.
            saved_nbytes = 4 - self.ratio * (TORCH_DTYPES[self.value_dtype].itemsize + 4)
            gain_s = saved_nbytes / (self.link_bps / 8) - 1 / self.compress_per_s  # per element
            chosen = min(MOST, math.ceil(self.compress_s / gain_s)) if gain_s > 0 else MOST
            if self.min_numel not in (DEFAULT_MIN_NUMEL, chosen):
                raise OptionError("algc: link_bps chooses min_numel itself; leave one of them out")
            self.min_numel = chosen

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        emits = super().traits.emits | ({Dense} if self.flush_every or self.min_numel_of else set())
        return dataclasses.replace(super().traits, emits=emits)

    @override
    def warnings(self) -> list[str]:
        note = (
            f"algc sends at least min_ratio={value_text(self.min_ratio)} of every layer, so the density is not "
            f"ratio={value_text(self.ratio)}; lower min_ratio too"
        )
        return [note] if self.ratio < self.min_ratio else []

    @override
    def leaves_dense(self, layer: Layer) -> bool:
        sizes = dict(text.split(":") for text in self.min_numel_of)
        fitting = [start for start in sizes if layer.name.startswith(start)]
        min_numel = int(sizes[max(fitting, key=len)]) if fitting else self.min_numel
        return dataclasses.replace(self.traits, min_numel=min_numel).leaves_dense(layer)

    @override
    def density_for(self, layer: Layer, step: Step) -> float | None:
        return None if self._flushes(step) else self._target(layer, step)

    def _target(self, layer: Layer, step: Step) -> float:
        average = self.density.at(step)
        control = step.memory.get(CONTROL, layer.id)
        if control is None:
            return average
        share = float(control[1]) / step.memory.derived("mean_rms", lambda: _mean_rms(step.memory))
        return min(max(average * share, self.min_ratio), max(self.max_ratio, average))

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        if self._flushes(step):
            return Dense(x.clone())
        return self._payload(x, find(x, self._tracked(layer, step)), layer, step)

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
        if residual is None or left is None or self._flushes(step):
            return PerLayer.encode_bucket(self, gradients, residual, left, layers, step, screen=screen)

        def encode(gradient: torch.Tensor, residual: torch.Tensor, left: torch.Tensor, layer: Layer) -> Payload:
            found = add_and_find(gradient, residual, self._tracked(layer, step), left)
            if screen and not math.isfinite(found[0]):  # the sum of squares, in fp64
                raise NonFinite
            payload = self._payload(left, found, layer, step)
            payload.subtract_from_(left)
            return payload

        return each_layer(encode, gradients, residual, left, layers)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # 1 - density, for the smallest possible density
        return self.form.bound_for(min(self.ratio, self.min_ratio) / WINDOW)

    def _flushes(self, step: Step) -> bool:
        return self.flush_every > 0 and step.index % self.flush_every == self.flush_every - 1

    def _tracked(self, layer: Layer, step: Step) -> float:
        # the threshold of the last step; infinity if the exact threshold must be computed in this step
        control = step.memory.get(CONTROL, layer.id)
        if control is None or self.threshold == "exact" or step.index % self.refresh == 0:
            return math.inf
        return float(control[0]) or math.inf

    def _payload(self, x: torch.Tensor, found: LargeEntries, layer: Layer, step: Step) -> Payload:
        """Return the payload of the entries that reached the threshold; store the layer's state for the next step."""
        squares, indices, values = found
        rms = math.sqrt(squares / x.numel())
        if rms == 0:
            return Sparse(x.numel(), torch.empty(0, dtype=torch.int64, device=x.device), x[:0])
        target, threshold = self._target(layer, step), self._tracked(layer, step)
        if math.isinf(threshold) or not target / WINDOW <= indices.numel() / layer.numel <= target * WINDOW:
            threshold, indices = self._exact(x, target)
            values = x.index_select(0, indices)
        reached = max(indices.numel(), 1) / layer.numel
        following = threshold * min(max((reached / target) ** self.gain, 0.5), 2.0)
        control = step.memory.get(CONTROL, layer.id)
        mean = rms if control is None else self.ema * float(control[1]) + (1 - self.ema) * rms
        step.memory.propose(CONTROL, layer.id, torch.tensor([following, mean, layer.numel], dtype=torch.float64))
        return self.form.payload(x.numel(), indices, values, step.world_size)

    def _exact(self, x: torch.Tensor, target: float) -> tuple[float, torch.Tensor]:
        """Return the threshold of top-k with the target density, and the positions of the entries that reach it.

        If many entries equal the threshold, at most about WINDOW times the target number of entries are returned. If
        fewer than k entries are not zero, the threshold is zero, and the positions of the entries that are not zero are
        returned.
        """
        indices = top_k(x, num_kept(target, x.numel()))
        threshold = float(magnitudes(x.index_select(0, indices)).amin())
        level = max(threshold, SMALLEST)
        reached, most = reaching(x, level), math.floor(WINDOW * target * x.numel()) + 1
        if len(reached) != len(indices):
            indices = top_k(x, most) if len(reached) > most else reached
        return threshold, indices


def _mean_rms(memory: Memory) -> float:
    # the mean over layers of the moving averages of root mean squares, weighted by layer size
    rows = torch.stack(list(memory.by_layer(CONTROL).values()))
    return float((rows[:, 1] * rows[:, 2]).sum() / rows[:, 2].sum())
