"""The units into which FSDP2 (`fully_shard`) divides a model, and the order of parameters in each unit's buffer."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from compressors.layer import Layer, layers_of


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """The parameters that FSDP2 gathers and reduces together: one module given to `fully_shard`, or a list of them.

    Attributes:
        name: name of the module, or of the first module of the list.
        module: the module with this name.
        layers: the trainable parameters, in the order of FSDP2's buffer; the shape of a layer is that of one rank's
            piece of the parameter, with padding.
        numel: number of elements of the gradient shard.
    """

    name: str
    module: FSDPModule
    layers: list[Layer]
    numel: int


def units_of(model: nn.Module) -> tuple[list[Unit], DeviceMesh]:
    """Return the units into which `fully_shard` divided a model, and their mesh of shards.

    Raises:
        ValueError: the model is not in FSDP2, or FSDP2 does not reduce all of its gradients over one mesh of shards.
    """
    of_state: dict[int, list[tuple[str, FSDPModule]]] = {}  # modules given to fully_shard together share a state
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = fully_shard.state(module)  # type: ignore[attr-defined]
            of_state.setdefault(id(state), []).append((name, module))
    if not of_state:
        if isinstance(model, DistributedDataParallel):
            raise ValueError("compression in FSDP2 needs a model in fully_shard and got one in DDP; use attach")
        wrapper = "one in FSDP1" if isinstance(model, FullyShardedDataParallel) else f"a bare {type(model).__name__}"
        raise ValueError(
            f"compression in FSDP2 needs a model in fully_shard and got {wrapper}; call fully_shard on its blocks, "
            "then on it"
        )
    for modules in of_state.values():
        for _, module in modules:
            module.reshard()  # because after a forward, parameters may be unsharded
    mesh = _mesh(model)
    layer_of = {id(layer.weight): layer for layer in layers_of(model)}
    units = []
    for modules in of_state.values():
        own = dict.fromkeys(map(id, _own_parameters([module for _, module in modules])))
        layers = [_piece(layer_of[key], mesh.size()) for key in own if key in layer_of]
        name, module = modules[0]
        numel = sum(layer.numel for layer in layers)
        units.append(Unit(name=name or "the model", module=module, layers=layers, numel=numel))
    return units, mesh


def _mesh(model: nn.Module) -> DeviceMesh:
    """Return the mesh over which all trainable parameters are sharded.

    Raises:
        ValueError: a parameter is not sharded, or there is no single mesh of shards.
    """
    meshes: dict[DeviceMesh, str] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            meshes.setdefault(parameter.device_mesh, name)
        elif parameter.requires_grad:
            raise ValueError(
                f"{name} is not sharded, so FSDP2 does not reduce its gradient; call fully_shard on the whole model "
                "after its blocks, without ignored_params"
            )
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device; call model.to_empty, and initialise it, before")
    for mesh, name in meshes.items():
        if mesh.ndim > 1:
            raise ValueError(
                f"{name} is sharded over a mesh of {mesh.ndim} dimensions, as in native HSDP, where FSDP2 exchanges "
                "gradients between replicas itself; give fully_shard mesh['shard'] only"
            )
    if len(meshes) > 1:
        first, second = list(meshes.values())[:2]
        raise ValueError(f"{first} and {second} are sharded over different meshes; give fully_shard the same one")
    return next(iter(meshes))


def _own_parameters(modules: Sequence[Any]) -> Iterator[nn.Parameter]:
    # in the order of FSDP2's buffer: children first, without nested units
    for module in modules:
        yield from _own_parameters([child for child in module.children() if not isinstance(child, FSDPModule)])
        yield from module.parameters(recurse=False)


def _piece(layer: Layer, num_shards: int) -> Layer:
    """Return the layer that stands for one rank's piece of a parameter, with FSDP2's padding."""
    assert isinstance(layer.weight, DTensor)
    (placement,) = layer.weight.placements
    assert isinstance(placement, Shard)
    shape = list(layer.shape)
    shape[placement.dim] = -(-shape[placement.dim] // num_shards)
    return dataclasses.replace(layer, shape=tuple(shape), numel=torch.Size(shape).numel(), weight=None)
