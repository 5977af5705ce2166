"""ALGC: adaptive layered gradient compression; every large layer gets its own density and tracks its own threshold.

Source: "Adaptive layered gradient compression with parameter server", Journal of Hubei Minzu University (Natural
Science) 43(1), 2025, 34-40, doi:10.13501/j.cnki.42-1908/n.2025.03.005 (the abstract: layers above a size threshold are
compressed, each with a sparsity threshold that is adjusted as training goes; the server adds gradients and residuals).
Differs: the abstract gives no formulas. Here a budget of entries is shared out by the layers' root mean squares, the
threshold follows the density by a multiplicative controller, a density outside [1/2, 2] of the wanted one is mended in
the same step, and values travel in 16 bits.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc, override

from collectives.options import MOST, Count, CountOrZero, OptionError, Positive, PositiveOrZero, value_text
from collectives.payloads.base import Payload
from collectives.payloads.dense import Dense
from collectives.payloads.sparse import Sparse
from compressors.kernels.residuals import Found, add_and_find, find
from compressors.kernels.selection import count_reaching, magnitudes, reaching, top_k
from compressors.kernels.value_types import TORCH_DTYPES
from compressors.layer import Layer, Memory, Step
from compressors.topk import DensitySparsifier, num_kept

DEFAULT_MIN_NUMEL = 8192
CONTROL = "control"  # per layer: threshold, mean root mean square, elements
WINDOW = 2.0  # a density may be off by this factor before the exact threshold is sought
SMALLEST = 2.0**-149  # of the positive fp32 numbers


@dataclasses.dataclass(kw_only=True)
class Algc(DensitySparsifier):
    """Layers of more than `min_numel` elements send the entries that reach their threshold; the others travel in fp32.

    The wanted density of layer l is ratio * rms_l / (mean rms, weighted by size), between min_ratio and max_ratio, so
    that the budget of ratio * (all elements) entries is kept while layers with larger gradients send more. After each
    step the threshold moves by the factor (density / wanted)^gain. The first threshold, every `refresh`-th and one
    whose density leaves the window are exact.

    Bytes: 16 + min over index codings (z v + indices) per compressed layer for z entries of v bytes, z between half
    and twice the wanted number; 16 + 4 m for all others together.

    Raises:
        OptionError: "algc: link_bps chooses min_numel itself; leave one of them out".
    """

    sends: ClassVar[type[Payload]] = Sparse

    min_numel: Annotated[CountOrZero, Doc("layers of at most this many elements are sent in fp32")] = DEFAULT_MIN_NUMEL
    min_numel_of: Annotated[
        tuple[str, ...],
        Doc("the same for layers whose names start so, as conv1:4096+fc:1024; the longest start that fits decides"),
    ] = ()
    min_ratio: Annotated[float, Gt(0), Le(1), Doc("least density of a layer")] = 1e-3
    max_ratio: Annotated[float, Gt(0), Le(1), Doc("largest density of a layer once warm-up is over")] = 0.25
    gain: Annotated[float, Ge(0), Lt(0.25), Doc("exponent with which the threshold follows the density")] = 0.05
    ema: Annotated[float, Ge(0), Lt(1), Doc("weight of the past in a layer's mean root mean square")] = 0.9
    refresh: Annotated[Count, Doc("steps after which the threshold is made exact again")] = 100
    threshold: Annotated[Literal["track", "exact"], Doc("exact is top-k with the layer's density")] = "track"
    flush_every: Annotated[CountOrZero, Doc("steps after which residuals are sent in full; 0: never")] = 0
    link_bps: Annotated[PositiveOrZero, Doc("choose min_numel for a link of this speed; 0: as given")] = 0.0
    compress_s: Annotated[PositiveOrZero, Doc("for link_bps: fixed seconds to compress a layer")] = 3e-4
    compress_per_s: Annotated[Positive, Doc("for link_bps: elements compressed per second")] = 3e8

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.min_numel_of:
            if not re.fullmatch(r"[^:]+:\d{1,18}", text):
                raise OptionError(
                    f"algc: min_numel_of={text} is not possible; write the start of a name and a size, fc:1024"
                )
        if self.min_ratio > self.max_ratio:
            raise OptionError("algc: min_ratio must be at most max_ratio; lower it, or raise max_ratio")
        if self.link_bps:
            chosen = self._worthwhile_numel()
            if self.min_numel not in (DEFAULT_MIN_NUMEL, chosen):
                raise OptionError("algc: link_bps chooses min_numel itself; leave one of them out")
            self.min_numel = chosen

    @property
    @override
    def emits(self) -> frozenset[type[Payload]]:
        return super().emits | ({Dense} if self.flush_every or self.min_numel_of else set())

    @override
    def warnings(self) -> list[str]:
        sentences = super().warnings()
        if self.ratio < self.min_ratio:
            sentences.append(
                f"algc sends at least min_ratio={value_text(self.min_ratio)} of every layer, so the density is not "
                f"ratio={value_text(self.ratio)}; lower min_ratio too"
            )
        return sentences

    @override
    def min_numel_for(self, layer: Layer) -> int:
        sizes = dict(text.split(":") for text in self.min_numel_of)
        fitting = [start for start in sizes if layer.name.startswith(start)]
        return int(sizes[max(fitting, key=len)]) if fitting else self.min_numel

    @override
    def density_for(self, layer: Layer, step: Step) -> float:
        average = self.density(step)
        control = step.memory.get(CONTROL, layer.id)
        if control is None:
            return average
        share = float(control[1]) / step.memory.derived("mean_rms", lambda: mean_rms(step.memory))
        return min(max(average * share, self.min_ratio), max(self.max_ratio, average))

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        if self._flushes(step):
            return Dense(x.clone())
        return self._payload(x, find(x, self._tracked(layer, step)), layer, step)

    @override
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload | None:
        if self._flushes(step):
            return None
        (gradient,) = gradients
        payload = self._payload(left, add_and_find(gradient, residual, self._tracked(layer, step), left), layer, step)
        payload.subtract_from_(left)
        return payload

    def contraction_bound(self, layer: Layer) -> float:
        """1 - density for the least density that the window allows."""
        return self._bound_for(min(self.ratio, self.min_ratio) / WINDOW)

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return None

    def _flushes(self, step: Step) -> bool:
        return self.flush_every > 0 and step.index % self.flush_every == self.flush_every - 1

    def _tracked(self, layer: Layer, step: Step) -> float:
        """The threshold that the last step left; infinite where it is to be exact."""
        control = step.memory.get(CONTROL, layer.id)
        if control is None or self.threshold == "exact" or step.index % self.refresh == 0:
            return math.inf
        return float(control[0]) or math.inf

    def _payload(self, x: torch.Tensor, found: Found, layer: Layer, step: Step) -> Payload:
        """What reaches the tracked threshold, or the exact one; proposes the next, and the mean root mean square."""
        rms = math.sqrt(found.squares / x.numel())
        if rms == 0:
            return Sparse(x.numel(), torch.empty(0, dtype=torch.int64, device=x.device), x[:0])
        wanted, threshold = self.density_for(layer, step), self._tracked(layer, step)
        indices, values = found.positions, found.values
        if math.isinf(threshold) or not wanted / WINDOW <= indices.numel() / layer.numel <= wanted * WINDOW:
            threshold, indices = self._exact(x, wanted)
            values = x.index_select(0, indices)
        reached = max(indices.numel(), 1) / layer.numel
        following = threshold * min(max((reached / wanted) ** self.gain, 0.5), 2.0)
        control = step.memory.get(CONTROL, layer.id)
        mean = rms if control is None else self.ema * float(control[1]) + (1 - self.ema) * rms
        step.memory.propose(CONTROL, layer.id, torch.tensor([following, mean, layer.numel], dtype=torch.float64))
        return self._sparse_values(x.numel(), indices, values, step)

    def _exact(self, x: torch.Tensor, wanted: float) -> tuple[float, torch.Tensor]:
        """The (1 - wanted)-quantile, and who reaches it; of many equal entries only as many as the window allows.

        Where it is zero, more than that share of the entries are zeros, and the others are sent.
        """
        indices = top_k(x, num_kept(wanted, x.numel()))
        threshold = float(magnitudes(x.index_select(0, indices)).amin())
        level = max(threshold, SMALLEST)
        count, most = count_reaching(x, level), math.floor(WINDOW * wanted * x.numel()) + 1
        if count == len(indices):
            return threshold, indices
        return threshold, top_k(x, most) if count > most else reaching(x, level)

    def _worthwhile_numel(self) -> int:
        """Size from which compressing a layer takes less time than it saves on the link.

        Compressing costs compress_s + m / compress_per_s seconds, and saves m (4 - ratio (v + 4)) bytes.
        """
        bytes_per_s = self.link_bps / 8
        kept_nbytes = self.ratio * (TORCH_DTYPES[self.value_dtype].itemsize + 4)
        gain_per_element = (4 - kept_nbytes) / bytes_per_s - 1 / self.compress_per_s
        return min(MOST, math.ceil(self.compress_s / gain_per_element)) if gain_per_element > 0 else MOST


def mean_rms(memory: Memory) -> float:
    """Return the mean over layers, weighted by size, of their mean root mean squares."""
    rows = torch.stack(list(memory.by_layer(CONTROL).values()))
    return float((rows[:, 1] * rows[:, 2]).sum() / rows[:, 2].sum())
