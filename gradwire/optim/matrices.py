"""Shared by optimizers of hidden matrices: which weights are hidden matrices, and AdamW for all other parameters."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch.optim.adamw import adamw
from typing_extensions import Doc, override

from collectives.options import Incompatible, Options, Positive, PositiveOrZero
from compressors.layer import Layer, layers_of
from gradwire.optim.base import BoundOptimizer, Trained, network_of, weight_of


def hidden_layers(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers whose weights are hidden matrices: convolution, linear and attention, but not the output layer.

    The output layer is the last weight in registration order if it is a convolution or a linear layer. If a norm or an
    embedding comes last, the network has no output layer of its own, because it reuses an embedding (tied weights).

    Args:
        layers: all trainable parameters, in registration order.
    """
    weights = [layer for layer in layers if layer.kind != "bias"]
    hidden = [layer for layer in weights if layer.kind in ("conv", "linear", "attention") and len(layer.shape) > 1]
    has_output = bool(weights) and weights[-1] in hidden and weights[-1].kind != "attention"
    return hidden[:-1] if has_output else hidden


def rows_of(tensor: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return a view of `tensor`, which has the layer's shape, as rows [out, ...]."""
    return tensor.movedim(layer.filter_axis or 0, 0)


def descend_(X: torch.Tensor, update: torch.Tensor, lr: float, scale: float, weight_decay: float) -> None:
    """Shrink X by the weight decay, and subtract lr * scale * update.

    Args:
        X: the weight, [out, ...], updated in place.
        update: matrix [out, all other dimensions of X].
        lr: the learning rate.
        scale: factor of lr that depends on the shape of the matrix.
        weight_decay: share of X removed per step, times lr.
    """
    X.mul_(1 - lr * weight_decay)
    X.add_(update.to(X.dtype).reshape(X.shape), alpha=-lr * scale)


@dataclasses.dataclass(kw_only=True)
class MatrixOptions(Options):
    """The options that Muon and Dion share."""

    default_lr: ClassVar[float] = 0.02

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

    def check_layers(self, layers: Sequence[Layer]) -> None:
        """Check that a network with these trainable parameters has hidden matrices.

        Raises:
            Incompatible: the network has no hidden matrices.
        """
        if not hidden_layers(layers):
            raise Incompatible(
                f"{self.component_name} updates hidden matrices, and this model has none besides its output layer and "
                "embeddings; use adamw"
            )


class MatrixOptimizer(BoundOptimizer):
    """Base of the optimizers with a special update for hidden matrices, which update all other parameters by AdamW.

    The first group of parameters contains the matrices, the second group the parameters that AdamW updates.

    Args:
        model: the network, whose `hidden_layers` are the matrices; or only parameters, where every parameter with two
            or more dimensions counts as a matrix.
        lr: the learning rate before any schedule.
        options: the options.
    """

    def __init__(self, model: Trained, lr: float, options: MatrixOptions) -> None:
        self.network = network_of(model)
        self.layers = layers_of(self.network)
        if model is self.network:
            options.check_layers(self.layers)
            self.hidden = hidden_layers(self.layers)
        else:
            self.hidden = [layer for layer in self.layers if len(layer.shape) > 1]
        self.others = [layer for layer in self.layers if layer not in self.hidden]
        matrices, others = ([weight_of(layer) for layer in part] for part in (self.hidden, self.others))
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "fused": True}]
        super().__init__(groups, {"lr": lr})
        self._options = options
        # AdamW's learning rate divided by lr, so that the schedule, which sets lr, also scales AdamW's rate.
        self._adamw_factor = 1.0 if options.adamw_lr is None else options.adamw_lr / lr if lr else 0.0
        for layer in self.hidden:
            weight = weight_of(layer)
            self.state[weight]["momentum"] = torch.zeros_like(rows_of(weight, layer).flatten(1))
        for each in others:
            step = torch.zeros((), dtype=torch.float32, device=each.device)
            self.state[each] = {"step": step, "mean": torch.zeros_like(each), "square": torch.zeros_like(each)}

    @override
    def update(self) -> None:
        self.update_matrices(self.param_groups[0]["lr"])
        self._update_others(self.param_groups[1]["lr"] * self._adamw_factor)

    @abc.abstractmethod
    def update_matrices(self, lr: float) -> None:
        """Update the hidden matrices in place, and exchange this optimizer's data."""

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
