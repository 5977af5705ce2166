"""The base of the sparse methods, each of which combines a density, a selection of entries, and a form of values.

The density determines how many entries are sent (`Density`), the selection which entries (`select`), and the form in
which type or code their values are sent (`compressors/parts/values.py`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le
from typing_extensions import Doc, override

from collectives.options import CountOrZero, OptionError
from collectives.payloads import Payload
from compressors.base import DenseEnds, ErrorFeedback, MinNumel, PerLayer, Skip, Traits, check_is_called
from compressors.kernels import batches
from compressors.kernels.selection import top_k
from compressors.layer import Layer, Step
from compressors.parts.buckets import summed
from compressors.parts.values import CodeForm, FloatForm, ValueForm

Ratio = Annotated[float, Gt(0), Le(1), Doc("sent entries / all entries")]
WarmupEpochs = Annotated[CountOrZero, Doc("epochs in which the density falls as 0.25^(epoch+1) down to ratio")]
WarmupSteps = Annotated[
    CountOrZero, Doc("for loops without epochs: optimizer steps in which the density falls to ratio in four stages")
]
STAGES = 4  # number of stages of a warm-up that is counted in steps


def num_kept(density: float, numel: int) -> int:
    """Return density * numel, rounded half up, between 1 and numel; 0 if numel is 0."""
    return min(numel, max(1, int(density * numel + 0.5)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Density:
    """The share of the entries to send, which falls to `ratio` in the first epochs or optimizer steps.

    Attributes:
        ratio: the share after the warm-up, in (0, 1].
        warmup_epochs: number of epochs in which the share is larger.
        warmup_steps: number of optimizer steps in which the share is larger; they are divided into four stages, which
            take the place of epochs. 0 to use `warmup_epochs`.
    """

    ratio: float
    warmup_epochs: int
    warmup_steps: int

    @property
    def denser_epochs(self) -> int:
        """Return the number of epochs at the start in which more entries are sent than later."""
        return sum(0.25 ** (epoch + 1) > self.ratio for epoch in range(self.warmup_epochs))

    def at(self, step: Step) -> float:
        """Return the share of the entries to send in this step, in (0, 1]."""
        passed, whole = step.epoch, self.warmup_epochs
        if self.warmup_steps:
            passed, whole = STAGES * step.index // self.warmup_steps, STAGES
        if not step.warmup or passed is None or passed >= whole:
            return self.ratio
        return max(self.ratio, 0.25 ** (passed + 1))


MomentumCorrection = Annotated[
    bool,
    Doc("apply momentum before selection, and clear it where an entry is sent; the optimizer's own momentum is off"),
]


@dataclasses.dataclass(kw_only=True)
class Sparsifier(PerLayer):
    """Base of the methods that send some entries and keep the others in the residual.

    A subclass declares those of the options `value_dtype`, `values`, `ratio`, `warmup_epochs` and `warmup_steps` that
    it has. By default the entries of largest magnitude are sent; to send other entries, override `select` and
    `select_all`.

    Raises:
        OptionError: momentum_correction without error_feedback, a value_dtype for values that are codes, or two
            warm-ups.
    """

    error_feedback: ErrorFeedback = True
    min_numel: MinNumel = 0
    skip: Skip = ()
    dense_ends: DenseEnds = False
    dense_steps: Annotated[
        CountOrZero, Doc("number of optimizer steps at the start in which everything is sent, in fp32")
    ] = 0
    momentum_correction: MomentumCorrection = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check that a subclass that defines `select` does not inherit a `select_all` that never calls `select`."""
        super().__init_subclass__(**kwargs)
        check_is_called(cls, "select", "select_all", Sparsifier.select_each)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum_correction and not self.error_feedback:
            raise OptionError(f"{self.component_name}: momentum_correction=true needs error_feedback=true")
        options = vars(self)
        if options.get("warmup_steps"):
            if "warmup_epochs" in self.given and options["warmup_epochs"]:
                raise OptionError(
                    f"{self.component_name}: warmup_steps={options['warmup_steps']} and warmup_epochs="
                    f"{options['warmup_epochs']} are two warm-ups of the density; leave one of them out"
                )
            options["warmup_epochs"] = 0
        if isinstance(self.form, CodeForm):
            if options["value_dtype"] != "fp16":
                raise OptionError(
                    f"{self.component_name}: values={options['values']} sends codes, so value_dtype="
                    f"{options['value_dtype']} has no use; leave value_dtype out, or use values=floats"
                )
            self.sends = self.form.kind  # type: ignore[misc]  # instead of the class's

    @functools.cached_property
    def form(self) -> ValueForm:
        """Return the form in which values are sent; by default, it follows from `values` and `value_dtype`."""
        options = vars(self)
        coding = options.get("values", "floats")
        return FloatForm(options["value_dtype"]) if coding == "floats" else CodeForm(coding)

    @functools.cached_property
    def density(self) -> Density:
        """Return the density, which follows from the option `ratio` and the options of the warm-up."""
        options = vars(self)
        names = ("warmup_epochs", "warmup_steps")
        return Density(ratio=options.get("ratio", 1.0), **{name: options.get(name, 0) for name in names})

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, denser_epochs=self.density.denser_epochs)

    @override
    def density_for(self, layer: Layer, step: Step) -> float | None:
        return self.density.at(step)

    def num_kept(self, layer: Layer, step: Step) -> int:
        """Return the number of entries of a layer to send, which follows from the layer's density."""
        return num_kept(self.density_for(layer, step) or 0.0, layer.numel)

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return None  # it depends on how many entries reach a threshold

    def select(self, x: torch.Tensor, layer: Layer, step: Step) -> torch.Tensor:
        """Return the positions of the entries of x, fp32 [layer.numel], to send: int64, ascending.

        By default these are the entries of largest magnitude; of equal magnitudes, the first entries are selected.
        """
        return top_k(x, self.num_kept(layer, step))

    def select_all(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool,
    ) -> tuple[torch.Tensor, list[int]]:
        """Write gradients + residual to `left`, and select entries of all layers in one call, as `select` does for one.

        The arguments are those of `encode_bucket`; tensors must lie on a CPU. NaN and infinity are selected, unless
        `screen` is True and raises the error.

        Returns:
            The positions, int64, ascending within each layer and counted from the layer's start; and the number of
            positions in each layer.
        """
        ks = [self.num_kept(layer, step) for layer in layers]
        return batches.top_k_of_layers(gradients, residual, left, [layer.numel for layer in layers], ks), ks

    def select_each(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool,
    ) -> tuple[torch.Tensor, list[int]]:
        """Do the work of `select_all` by calling `select` for each layer."""
        xs = summed(gradients, residual, left, layers, screen=screen)
        selected = [self.select(x, layer, step) for x, layer in zip(xs, layers, strict=True)]
        return torch.cat(selected), [len(each) for each in selected]

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        positions = self.select(x, layer, step)
        return self.form.payload(x.numel(), positions, x.index_select(0, positions), step.world_size)

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
        if left is None or not batches.serves(left):
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)
        positions, counts = self.select_all(gradients, residual, left, layers, step, screen=screen)
        numels = [layer.numel for layer in layers]
        return self.form.send(left, numels, counts, positions, step.world_size, screen=screen)
