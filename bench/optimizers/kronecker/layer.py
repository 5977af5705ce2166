"""Layers whose curvature is approximated by two small matrices, and the second moments that these consist of.

For a layer with weights W [out, in], A = E[a a^T] is the second moment of its inputs (with a 1 for the bias) and
G = E[g g^T] that of the gradients of its outputs. A convolution has one a and one g per position, each divided by the
number of positions.

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

# For each layer A, then G: symmetric, fp32 [d, d].
Moments = list[torch.Tensor]


@dataclasses.dataclass(eq=False)
class KroneckerLayer:
    """A linear or convolution layer of a model.

    Attributes:
        module: the layer.
    """

    module: nn.Linear | nn.Conv2d

    @property
    def has_bias(self) -> bool:
        """Return True if a bias is trained together with the weights."""
        return self.module.bias is not None and self.module.bias.requires_grad

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the numbers of rows of A and of G."""
        weight = self.module.weight
        return weight[0].numel() + self.has_bias, weight.shape[0]

    def input_moment(self, x: torch.Tensor) -> torch.Tensor:
        """Return A of one batch of inputs, fp32 [in, in]."""
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
        """Return G of the gradients of one batch of outputs, fp32 [out, out]."""
        if isinstance(self.module, nn.Linear):
            return second_moment(gradient.float().reshape(-1, gradient.shape[-1]))
        positions = gradient[0, 0].numel()
        return second_moment(gradient.float().flatten(2).transpose(1, 2).flatten(0, 1) / positions)

    @property
    def gradient(self) -> torch.Tensor:
        """Return the gradient of weights and bias as one matrix [out, in]."""
        weight, bias = self.module.weight, self.module.bias
        assert weight.grad is not None
        matrix = weight.grad.flatten(1)
        if not self.has_bias:
            return matrix
        assert bias is not None
        assert bias.grad is not None
        return torch.cat([matrix, bias.grad[:, None]], dim=1)

    def replace_gradient(self, matrix: torch.Tensor) -> None:
        """Overwrite the gradients of weights and bias with a matrix [out, in]."""
        weight, bias = self.module.weight, self.module.bias
        assert weight.grad is not None
        weight.grad.copy_(matrix[:, : weight[0].numel()].view_as(weight))
        if self.has_bias:
            assert bias is not None
            assert bias.grad is not None
            bias.grad.copy_(matrix[:, -1])


def kronecker_layers(model: nn.Module) -> Iterator[KroneckerLayer]:
    """Yield the trained layers that have two factors of their own.

    Grouped convolutions, convolutions with other padding than a number of zeros, and layers that share weights have
    none.
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
    """Return the mean of r r^T over rows r, [n, d] -> [d, d], exactly symmetric."""
    moment = rows.T @ (rows / len(rows))
    return (moment + moment.T) / 2


class MomentCapture:
    """Compute the second moments of a model's layers during forward and backward, when they are wanted.

    Args:
        model: gets hooks on itself and on its layers, which do almost nothing while no moments are wanted.

    Attributes:
        layers: the layers with factors, in the model's order.
        wanted: set to True to compute the moments of the next forward and backward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(kronecker_layers(model))
        self.wanted = False
        self._inputs: list[list[torch.Tensor]] = []
        self._outputs: list[list[torch.Tensor]] = []
        self._clear()
        # The moments of a skipped step must not count in the next.
        model.register_forward_pre_hook(lambda *_: self._clear())
        for index, layer in enumerate(self.layers):
            layer.module.register_forward_hook(lambda _, x, y, index=index: self._take(index, x[0], y))

    def moments(self) -> Moments:
        """Return the moments of the last forward and backward; if a layer was called several times, their mean."""
        return [
            torch.stack(calls).mean(dim=0) if len(calls) > 1 else calls[0]
            for of_layer in zip(self._inputs, self._outputs, strict=True)
            for calls in of_layer
        ]

    def _clear(self) -> None:
        self._inputs = [[] for _ in self.layers]
        self._outputs = [[] for _ in self.layers]

    def _take(self, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Compute A, and G in a hook of the output: a backward hook of the module forbids in-place activations."""
        if not (self.wanted and y.requires_grad):
            return
        layer = self.layers[index]
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            self._inputs[index].append(layer.input_moment(x))
        outputs = self._outputs[index]

        def take_gradient(gradient: torch.Tensor) -> None:
            outputs.append(layer.output_moment(gradient))

        y.register_hook(take_gradient)
