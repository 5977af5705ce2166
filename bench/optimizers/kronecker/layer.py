"""Layers whose curvature is approximated by two small matrices, and the second moments that these are made of.

For a layer of weights W [out, in], A = E[a a^T] is of what it multiplies (with a 1 for the bias) and G = E[g g^T] of
the gradients of what it returns. A convolution has one row of each per position, divided by the number of positions.

Source: Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature" (2015); Grosse,
Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers" (2016); scaled as in kfac-pytorch
(kfac/layers/modules.py and utils.py, Pauloski et al. 2021).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

Moments = list[torch.Tensor]
"""Of every layer A, then G: fp32 [d, d] each, symmetric."""


@dataclasses.dataclass(eq=False)
class KroneckerLayer:
    """A linear or convolution layer of a model.

    Attributes:
        module: the layer.
    """

    module: nn.Linear | nn.Conv2d

    @property
    def has_bias(self) -> bool:
        """Whether a bias is trained with the weights."""
        return self.module.bias is not None and self.module.bias.requires_grad

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of A and of G."""
        weight = self.module.weight
        return weight[0].numel() + self.has_bias, weight.shape[0]

    def input_moment(self, x: torch.Tensor) -> torch.Tensor:
        """A of one batch that the layer was called with: fp32 [in, in]."""
        if isinstance(self.module, nn.Linear):
            rows, positions = x.float().reshape(-1, x.shape[-1]), 1
        else:
            convolution = self.module
            assert not isinstance(convolution.padding, str)
            patches = functional.unfold(
                x.float(),
                convolution.kernel_size,
                dilation=convolution.dilation,
                padding=convolution.padding,
                stride=convolution.stride,
            )
            rows, positions = patches.transpose(1, 2).flatten(0, 1), patches.shape[2]
        if self.has_bias:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        return second_moment(rows / positions)

    def output_moment(self, gradient: torch.Tensor) -> torch.Tensor:
        """G of the gradients of one batch of outputs: fp32 [out, out]."""
        if isinstance(self.module, nn.Linear):
            return second_moment(gradient.float().reshape(-1, gradient.shape[-1]))
        positions = gradient[0, 0].numel()
        return second_moment(gradient.float().flatten(2).transpose(1, 2).flatten(0, 1) / positions)

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of weights and bias as one matrix [out, in]."""
        weight, bias = self.module.weight, self.module.bias
        assert weight.grad is not None
        matrix = weight.grad.flatten(1)
        if not self.has_bias:
            return matrix
        assert bias is not None
        assert bias.grad is not None
        return torch.cat([matrix, bias.grad[:, None]], dim=1)

    def replace_gradient(self, matrix: torch.Tensor) -> None:
        """Write a matrix [out, in] over the gradients of weights and bias."""
        weight, bias = self.module.weight, self.module.bias
        assert weight.grad is not None
        weight.grad.copy_(matrix[:, : weight[0].numel()].view_as(weight))
        if self.has_bias:
            assert bias is not None
            assert bias.grad is not None
            bias.grad.copy_(matrix[:, -1])


def kronecker_layers(model: nn.Module) -> Iterator[KroneckerLayer]:
    """The layers that are trained and have two factors of their own.

    A grouped convolution, or one padded with no zeros, has none; nor have layers that share their weights.
    """
    uses = collections.Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Conv2d) or not module.weight.requires_grad:
            continue
        if any(uses[id(parameter)] > 1 for parameter in module.parameters(recurse=False)):
            continue
        if isinstance(module, nn.Conv2d) and (
            module.groups > 1 or module.padding_mode != "zeros" or isinstance(module.padding, str)
        ):
            continue
        yield KroneckerLayer(module)


def second_moment(rows: torch.Tensor) -> torch.Tensor:
    """The mean of r r^T over rows r: [n, d] -> [d, d], symmetric bit for bit."""
    moment = rows.T @ (rows / len(rows))
    return (moment + moment.T) / 2


class MomentCapture:
    """Takes the second moments of a model's layers in a forward and backward, when they are wanted.

    Args:
        model: gets hooks on itself and on its layers, which cost one test each while nothing is wanted.

    Attributes:
        layers: in the model's order.
        wanted: take those of the next forward and backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(kronecker_layers(model))
        self.wanted = False
        self._inputs: list[list[torch.Tensor]] = []
        self._outputs: list[list[torch.Tensor]] = []
        self._clear()
        # What a step left that was skipped must not count in the next.
        model.register_forward_pre_hook(lambda *_: self._clear())
        for index, layer in enumerate(self.layers):
            layer.module.register_forward_hook(lambda _, x, y, index=index: self._take(index, x[0], y))

    def moments(self) -> Moments:
        """The moments of the last forward and backward, a layer's mean over its calls."""
        return [
            torch.stack(calls).mean(dim=0) if len(calls) > 1 else calls[0]
            for of_layer in zip(self._inputs, self._outputs, strict=True)
            for calls in of_layer
        ]

    def _clear(self) -> None:
        self._inputs = [[] for _ in self.layers]
        self._outputs = [[] for _ in self.layers]

    def _take(self, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """A hook of the output and not of the module: those do not go together with activations in place."""
        if not (self.wanted and y.requires_grad):
            return
        layer = self.layers[index]
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            self._inputs[index].append(layer.input_moment(x))
        outputs = self._outputs[index]

        def take_gradient(gradient: torch.Tensor) -> None:
            outputs.append(layer.output_moment(gradient))

        y.register_hook(take_gradient)
