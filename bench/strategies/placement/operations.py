"""What kind of work an operation is: a matrix product, a convolution, an activation, or something around them."""

from __future__ import annotations

from typing import Literal

from torch import fx, nn

Work = Literal["matrix", "convolution", "activation", "other"]

# Modules are known by their class, functions and methods by their name: `leaky_relu` does what `LeakyReLU` does.
_ACTIVATIONS = tuple(name for name in nn.modules.activation.__all__ if name != "MultiheadAttention")
_ACTIVATION_MODULES = tuple(getattr(nn, name) for name in _ACTIVATIONS)
_ACTIVATION_NAMES = frozenset(name.lower() for name in _ACTIVATIONS)
_MATRIX_NAMES = frozenset(["linear", "bilinear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "einsum"])


def work_of(node: fx.Node, traced: fx.GraphModule) -> Work:
    """What kind of work a node of a traced network is."""
    if node.op == "call_module":
        return _work_of_module(traced.get_submodule(str(node.target)))
    if node.op in ("call_function", "call_method"):
        return _work_of_name(getattr(node.target, "__name__", str(node.target)))
    return "other"


def _work_of_module(module: nn.Module) -> Work:
    if isinstance(module, (nn.Linear, nn.Bilinear)):
        return "matrix"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution"
    return "activation" if isinstance(module, _ACTIVATION_MODULES) else "other"


def _work_of_name(name: str) -> Work:
    name = name.strip("_").replace("_", "")
    if name in _MATRIX_NAMES:
        return "matrix"
    if name.startswith("conv"):
        return "convolution"
    return "activation" if name in _ACTIVATION_NAMES else "other"
