"""A network as a graph of operations, one node each, as torch.fx traces it.

Source: Reed et al., "torch.fx: Practical program capture and transformation for deep learning in Python" (MLSys 2022).
Differs: what works in place is rewritten to make a new tensor, for a tensor that lies on two devices cannot be changed
on one of them only. Whoever uses that tensor later uses the new one.
"""

from __future__ import annotations

import copy

import torch
from torch import fx, nn

from bench.core.errors import UsageError

IN_PLACE = "changed in place"
"""Key in a node's `meta`: the input that the network's own code changes there."""


def trace(model: nn.Module) -> fx.GraphModule:
    """The network's graph; its modules are copies without in-place operations that share `model`'s parameters.

    Raises:
        UsageError: what the network computes depends on its input's values, so there is no one graph.
    """
    parameters = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    shared = copy.deepcopy(model, memo=dict(parameters))  # modules are copied, tensors are not
    in_place = {name for name, module in shared.named_modules() if getattr(module, "inplace", False)}
    for name in in_place:
        setattr(shared.get_submodule(name), "inplace", False)  # noqa: B010 - modules in general declare no such attribute
    try:
        traced = fx.symbolic_trace(shared)
    except Exception as error:  # noqa: BLE001 - tracing runs the network's own code on stand-ins, which may do anything
        raise UsageError(
            f"the model cannot be traced ({_first_line(error)}), so its layers cannot be placed by type; use "
            "--strategy ddp, or a model without branches that depend on values"
        ) from None
    before: set[fx.Node] = set()
    for node in traced.graph.nodes:
        before.add(node)
        if (node.op == "call_module" and node.target in in_place) or _rewritten(node):
            node.meta[IN_PLACE] = changed = node.all_input_nodes[0]
            changed.replace_all_uses_with(node, delete_user_cb=lambda user: user not in before)
    traced.recompile()
    return traced


def _rewritten(node: fx.Node) -> bool:
    """Whether a function or method changed its first input; it makes a new tensor from now on."""
    if node.kwargs.get("inplace"):
        node.update_kwarg("inplace", False)
        return True
    if node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).startswith("_"):
        node.target = str(node.target).removesuffix("_")
        return True
    return False


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def parameters_of(node: fx.Node, traced: fx.GraphModule) -> list[str]:
    """Names of the trainable parameters that a node reads; one that modules share has the name of the first."""
    read: list[torch.Tensor | None] = []
    if node.op == "call_module":
        read = list(traced.get_submodule(str(node.target)).parameters())
    elif node.op == "get_attr":
        read = [attribute(traced, str(node.target))]
    return [name for name, p in traced.named_parameters() if p.requires_grad and any(p is tensor for tensor in read)]


def attribute(traced: fx.GraphModule, path: str) -> torch.Tensor | None:
    """The tensor that a name such as "layer.weight" stands for; None where it is none."""
    owner, _, name = path.rpartition(".")
    value = getattr(traced.get_submodule(owner), name)
    return value if isinstance(value, torch.Tensor) else None
