"""What optimizers of hidden matrices share: which weights are hidden matrices, and AdamW for all other parameters."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar, cast

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import nn
from torch.optim.adamw import adamw
from typing_extensions import Doc, override

from bench.optimizers.base import Optimizer
from collectives.options import Incompatible, OptionError, Positive, PositiveOrZero
from compressors.layer import Layer, layers_of
from gradwire.exchange.communicator import CompressedCommunicator


def hidden_layers(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers whose weights are hidden matrices: convolution, linear and attention, but no output layer.

    The output layer is the last weight in registration order if it is a convolution or a linear layer. If a norm or an
    embedding comes last, the network has no output layer of its own, because it reuses an embedding (tied weights).

    Args:
        layers: all trainable parameters, in registration order.
    """
    weights = [layer for layer in layers if layer.kind != "bias"]
    hidden = [layer for layer in weights if layer.kind in ("conv", "linear", "attention") and len(layer.shape) > 1]
    has_output = bool(weights) and weights[-1] in hidden and weights[-1].kind != "attention"
    return hidden[:-1] if has_output else hidden


def as_matrix(tensor: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return a tensor of the layer's shape as a matrix [out, rest]; a view if possible."""
    return tensor.movedim(layer.filter_axis or 0, 0).flatten(1)


def as_layer(matrix: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return a matrix [out, rest] in the layer's shape; a view."""
    axis = layer.filter_axis or 0
    out, *rest = [layer.shape[axis], *layer.shape[:axis], *layer.shape[axis + 1 :]]
    return matrix.reshape(out, *rest).movedim(0, axis)


@dataclasses.dataclass(kw_only=True)
class MatrixOptimizer(Optimizer):
    """Base of the optimizers that update hidden matrices in a way of their own, and all other parameters by AdamW."""

    needs_layers: ClassVar[bool] = True

    momentum: Annotated[float, Ge(0), Lt(1), Doc("share of a matrix's momentum that a step keeps")] = 0.95
    weight_decay: Annotated[PositiveOrZero, Doc("share of a matrix removed per step, times lr")] = 0.0
    adamw_lr: Annotated[
        float | None,
        Gt(0),
        Le(1e12),
        Doc("learning rate of AdamW for all other parameters; the schedule scales it as it scales lr; none: lr"),
    ] = 0.001
    adamw_beta1: Annotated[float, Ge(0), Lt(1), Doc("AdamW's decay rate of the mean of gradients")] = 0.9
    adamw_beta2: Annotated[float, Ge(0), Lt(1), Doc("AdamW's decay rate of the mean of squared gradients")] = 0.95
    adamw_eps: Annotated[Positive, Doc("added to the root of AdamW's second moment")] = 1e-10
    adamw_weight_decay: Annotated[PositiveOrZero, Doc("AdamW's weight decay")] = 0.0

    @override
    def check_layers(self, layers: Sequence[Layer]) -> None:
        if not hidden_layers(layers):
            raise Incompatible(
                f"{self.component_name} updates hidden matrices, and this model has none besides its output layer and "
                "embeddings; use --optimizer adamw"
            )

    @override
    def hand_over_momentum(self) -> tuple[Optimizer, float, bool]:
        raise OptionError(
            f"{self.component_name} applies its momentum to matrices only and cannot hand it over; add "
            "momentum_correction=false to the compressor"
        )

    @override
    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Build the optimizer of parameters without a model: all of two or more dimensions are hidden matrices."""
        layers = layers_of(nn.ParameterList(parameters))
        return self.steps(layers, [layer for layer in layers if len(layer.shape) > 1], lr, None)

    @override
    def bind(self, model: nn.Module, lr: float, channel: CompressedCommunicator | None = None) -> torch.optim.Optimizer:
        layers = layers_of(model)
        return self.steps(layers, hidden_layers(layers), lr, channel)

    @abc.abstractmethod
    def steps(
        self, layers: Sequence[Layer], hidden: Sequence[Layer], lr: float, channel: CompressedCommunicator | None
    ) -> MatrixSteps:
        """Return the torch optimizer.

        Args:
            layers: all trainable parameters.
            hidden: those of them that are hidden matrices.
            lr: the learning rate before any schedule.
            channel: carries what the optimizer exchanges; None if it exchanges nothing.
        """


class MatrixSteps(torch.optim.Optimizer, abc.ABC):
    """Run an optimizer of hidden matrices as a torch optimizer; a subclass updates the matrices.

    The first group of parameters holds the matrices, the second the parameters that AdamW updates.

    Args:
        options: the options.
        layers: all trainable parameters.
        hidden: those of them that are hidden matrices.
        lr: the learning rate before any schedule.
    """

    def __init__(self, options: MatrixOptimizer, layers: Sequence[Layer], hidden: Sequence[Layer], lr: float) -> None:
        self._hidden = list(hidden)
        self._others = [layer for layer in layers if layer not in self._hidden]
        matrices, others = ([weight_of(layer) for layer in part] for part in (self._hidden, self._others))
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "fused": True}]
        super().__init__(groups, {"lr": lr})
        self._options = options
        # AdamW's rate per unit of lr, so that the schedule, which sets lr, scales it too.
        self._adamw_factor = 1.0 if options.adamw_lr is None else options.adamw_lr / lr if lr else 0.0
        for each in others:
            step = torch.zeros((), dtype=torch.float32, device=each.device)
            self.state[each] = {"step": step, "mean": torch.zeros_like(each), "square": torch.zeros_like(each)}

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._update_matrices(self.param_groups[0]["lr"])
        self._update_others(self.param_groups[1]["lr"] * self._adamw_factor)
        return loss

    @abc.abstractmethod
    def _update_matrices(self, lr: float) -> None:
        """Update the hidden matrices in place, and exchange what the optimizer exchanges."""

    def _descend(self, layer: Layer, update: torch.Tensor, lr: float, scale: float) -> None:
        """Shrink a layer's weight by the weight decay, and subtract lr * scale * update, a matrix [out, rest]."""
        weight = weight_of(layer)
        weight.mul_(1 - lr * self._options.weight_decay)
        weight.add_(as_layer(update, layer).to(weight.dtype), alpha=-lr * scale)

    def _update_others(self, lr: float) -> None:
        parameters = [each for each in self.param_groups[1]["params"] if each.grad is not None]
        if not parameters:
            return
        means, squares, steps = ([self.state[each][name] for each in parameters] for name in ("mean", "square", "step"))
        adamw(
            parameters,
            [each.grad for each in parameters],
            means,
            squares,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=self._options.adamw_beta1,
            beta2=self._options.adamw_beta2,
            lr=lr,
            weight_decay=self._options.adamw_weight_decay,
            eps=self._options.adamw_eps,
            maximize=False,
        )


def weight_of(layer: Layer) -> nn.Parameter:
    """Return the parameter that a layer of a model stands for."""
    return cast(nn.Parameter, layer.weight)
