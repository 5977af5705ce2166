"""What a compressor is: gradient -> payload, with the state that error feedback needs, once for all methods.

Source: error feedback as in Karimireddy et al. 2019 (arXiv:1901.09847): x = g + r, payload = encode(x), r' = x - payload. The residual is
in gradient units, lives on its rank in fp32, is keyed by layer and never reduced.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from typing import Annotated, Any, ClassVar, Literal

import torch
from typing_extensions import Doc

from collectives.base import Collective
from collectives.kinds.bundle import Bundle, members
from collectives.options import Options
from collectives.payload import Payload
from compressors.layer import Bucket, Layer, Sent, Step


@dataclasses.dataclass(kw_only=True)
class Compressor(Options, abc.ABC):
    """One file, one class, named after the file; dataclass fields are its options.

    Class facts:
        biased: the decoded payload's expectation is not the gradient.
        contraction: |x - C(x)|^2 <= (1 - d) |x|^2 for some d > 0, without which error feedback diverges.
        fixed_size: the payload's bytes follow from the layer's shape alone.
        shared_randomness: all ranks must draw the same numbers at one step.
        granularity: "layer" encodes each layer by itself, "bucket" the layers of a bucket laid end to end in model order.
    """

    biased: ClassVar[bool] = True
    contraction: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = True
    shared_randomness: ClassVar[bool] = False
    granularity: ClassVar[Literal["layer", "bucket"]] = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._residuals = ResidualStore()

    @property
    def keeps_residual(self) -> bool:
        """Whether what was not sent is added to the next gradient."""
        return False

    @property
    @abc.abstractmethod
    def emits(self) -> frozenset[type[Payload]]:
        """Kinds of payload that `encode` makes under these options (the members of a bundle, not the bundle)."""

    @abc.abstractmethod
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        """The payload to send for `x`.

        Args:
            x: fp32 [layer.numel], finite; must not be changed.
            layer: what `x` belongs to.
            step: where training is.
        """

    def finish(self, total: Payload, layer: Layer, step: Step, out: torch.Tensor) -> None:
        """Turn the sum over ranks into the update: the mean, the one place that divides. Overwrites `out`, floating [layer.numel]."""
        out.zero_()
        total.add_to_(out, divisor=step.world_size)

    @abc.abstractmethod
    def expected_nbytes(self, layer: Layer) -> int | None:
        """Packed bytes for one layer at full compression as a closed form; None where it depends on the data."""

    def reduce(self, bucket: Bucket, collective: Collective) -> None:
        """Replace each gradient of the bucket by the mean over ranks of what was transmitted; every rank must call.

        New residuals are only proposed: `commit` accepts them, `drop` forgets them. Fills `bucket.sent` and `bucket.encode_s`.
        """
        started = time.perf_counter()
        units = units_of(bucket, self.granularity)
        payloads = [self._encode_unit(unit, bucket) for unit in units]
        message = payloads[0] if len(payloads) == 1 else Bundle(payloads)
        encoded = time.perf_counter()
        total = collective.sum(message, bucket.key)
        summed = time.perf_counter()
        for unit, part in zip(units, members(total, [unit.layer.numel for unit in units]), strict=True):
            unit.finish_with(self, part, bucket.step)
        bucket.encode_s = (encoded - started) + (time.perf_counter() - summed)

    def commit(self) -> None:
        """Accept the state proposed since the last `commit` or `drop`."""
        self._residuals.commit()

    def drop(self) -> None:
        """Forget the proposed state: residuals are bit for bit what they were before the step."""
        self._residuals.drop()

    def residual_norms(self) -> dict[int, float]:
        """L2 norm of each layer's residual, by layer id."""
        return {layer_id: float(r.norm()) for layer_id, r in self._residuals.by_layer().items()}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: residuals by layer id. Differs between ranks."""
        return {"residuals": {i: r.clone() for i, r in self._residuals.by_layer().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._residuals.load(state["residuals"])

    def _encode_unit(self, unit: Unit, bucket: Bucket) -> Payload:
        started = time.perf_counter()
        x = self._residuals.compensate(unit) if self.keeps_residual else unit.flat()
        payload = self.encode(x, unit.layer, bucket.step)
        if self.keeps_residual:
            payload.subtract_from_(x)
        bucket.sent.extend(unit.account(payload, time.perf_counter() - started))
        return payload


@dataclasses.dataclass(kw_only=True)
class LossyCompressor(Compressor):
    """A compressor that may keep what it did not send."""

    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = False

    @property
    def keeps_residual(self) -> bool:
        """As the option says."""
        return self.error_feedback


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """What one `encode` call covers: one layer, or a bucket's layers laid end to end in model order.

    Attributes:
        layer: the layer, or a flat stand-in for several.
        layers: the layers inside, in model order.
        gradients: their flat gradient views, in the same order.
    """

    layer: Layer
    layers: list[Layer]
    gradients: list[torch.Tensor]

    @property
    def key(self) -> tuple[int, ...]:
        """Ids of the layers inside."""
        return tuple(layer.id for layer in self.layers)

    @property
    def borders(self) -> list[int]:
        """Where each layer starts, and the end."""
        borders = [0]
        for layer in self.layers:
            borders.append(borders[-1] + layer.numel)
        return borders

    def flat(self) -> torch.Tensor:
        """The gradient as one fp32 tensor [layer.numel]; may share memory with the bucket."""
        if len(self.gradients) == 1:
            return self.gradients[0].float()
        return torch.cat([g.float() for g in self.gradients])

    def finish_with(self, compressor: Compressor, total: Payload, step: Step) -> None:
        """Let the compressor turn the sum into the update and lay it into the gradients."""
        if len(self.gradients) == 1:
            compressor.finish(total, self.layer, step, self.gradients[0])
            return
        update = torch.empty(self.layer.numel, device=self.gradients[0].device)
        compressor.finish(total, self.layer, step, update)
        for gradient, part in zip(self.gradients, update.split([layer.numel for layer in self.layers]), strict=True):
            gradient.copy_(part)

    def account(self, payload: Payload, seconds: float) -> list[Sent]:
        """The payload's bytes and time, shared over the layers inside by what each sends."""
        counts = payload.entries_between(self.borders)
        total = max(1, sum(counts))
        return [
            Sent(
                layer=layer,
                payload=type(payload).__name__,
                nbytes=payload.nbytes * count / total,
                num_entries=count,
                seconds=seconds * layer.numel / max(1, self.layer.numel),
            )
            for layer, count in zip(self.layers, counts, strict=True)
        ]


def units_of(bucket: Bucket, granularity: Literal["layer", "bucket"]) -> list[Unit]:
    """How a compressor of this granularity cuts the bucket; layers in model order."""
    pairs = sorted(zip(bucket.layers, bucket.gradients, strict=True), key=lambda pair: pair[0].id)
    if granularity == "layer" or len(pairs) == 1:
        return [Unit(layer=layer, layers=[layer], gradients=[gradient]) for layer, gradient in pairs]
    layers = [layer for layer, _ in pairs]
    numel = sum(layer.numel for layer in layers)
    flat = Layer(id=layers[0].id, name=f"{layers[0].name}..{layers[-1].name}", shape=(numel,), numel=numel)
    return [Unit(layer=flat, layers=layers, gradients=[gradient for _, gradient in pairs])]


class ResidualStore:
    """Residuals by layer, in the groups in which buckets hand them over, with proposed values beside accepted ones.

    DDP regroups its buckets after the first step; the store then regroups its tensors and loses nothing.
    """

    def __init__(self) -> None:
        self._accepted: dict[tuple[int, ...], torch.Tensor] = {}
        self._proposed: dict[tuple[int, ...], torch.Tensor] = {}
        self._spare: dict[tuple[int, ...], torch.Tensor] = {}
        self._sizes: dict[int, int] = {}

    def compensate(self, unit: Unit) -> torch.Tensor:
        """g + r as fp32 [numel]; the returned tensor is the proposed residual once the payload was subtracted from it."""
        self._sizes.update((layer.id, layer.numel) for layer in unit.layers)
        if unit.key not in self._accepted:
            self._regroup(unit)
        residual = self._accepted.get(unit.key)
        x = self._spare.pop(unit.key, None)
        if x is None:
            x = torch.empty(unit.layer.numel, device=unit.gradients[0].device)
        for gradient, start, stop in zip(unit.gradients, unit.borders, unit.borders[1:], strict=False):
            if residual is None:
                x[start:stop].copy_(gradient)
            else:
                torch.add(gradient, residual[start:stop], out=x[start:stop])
        self._proposed[unit.key] = x
        return x

    def commit(self) -> None:
        """Proposed residuals become accepted; the old ones are kept as spare memory."""
        self._spare.update({key: self._accepted[key] for key in self._proposed if key in self._accepted})
        self._accepted.update(self._proposed)
        self._proposed = {}

    def drop(self) -> None:
        """Proposed residuals become spare memory."""
        self._spare.update(self._proposed)
        self._proposed = {}

    def by_layer(self) -> dict[int, torch.Tensor]:
        """Accepted residuals, one view per layer id."""
        views = {}
        for key, flat in self._accepted.items():
            views.update(zip(key, flat.split([self._sizes[i] for i in key]), strict=True))
        return views

    def load(self, residuals: dict[int, torch.Tensor]) -> None:
        """Replace all state by these residuals."""
        self.__init__()  # type: ignore[misc]
        for layer_id, residual in residuals.items():
            self._sizes[layer_id] = residual.numel()
            self._accepted[(layer_id,)] = residual.clone()

    def _regroup(self, unit: Unit) -> None:
        wanted = set(unit.key)
        views = self.by_layer()
        if not wanted & set(views):
            return
        merged = torch.cat(
            [views[i] if i in views else unit.gradients[0].new_zeros(self._sizes[i], dtype=torch.float32) for i in unit.key]
        )
        for key in [key for key in self._accepted if wanted & set(key)]:
            del self._accepted[key]
            self._spare.pop(key, None)
            for i in set(key) - wanted:
                self._accepted[(i,)] = views[i].clone()
        self._accepted[unit.key] = merged
