"""A network that a user's function builds: `--model path/net.py:build:width=64`."""

import dataclasses
import weakref
from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from bench.core import functions
from bench.core.errors import PluginError
from bench.models.base import Model


@dataclasses.dataclass(kw_only=True, eq=False)
class FunctionModel(functions.FunctionOptions, Model):
    """Calls a user's function or class that returns the network, with `num_classes` if it has such a parameter."""

    passed: ClassVar[tuple[str, ...]] = ("num_classes",)

    @override
    def build(self, num_classes: int) -> nn.Module:
        try:
            network = self.call(num_classes=num_classes)
        except PluginError:
            if torch.get_default_device().type != "meta":
                raise
            with torch.device("cpu"):  # for a network that reads values while it is built
                network = self.call(num_classes=num_classes)
            network = network.to("meta") if isinstance(network, nn.Module) else network
        if not isinstance(network, nn.Module):
            raise PluginError(
                f"{self.component_name} must return a torch.nn.Module, and returned {functions.described(network)}"
            )
        layers = [module for module in network.modules() if next(module.parameters(recurse=False), None) is not None]
        if any(layer in _built for layer in layers):
            raise PluginError(
                f"{self.component_name} returned the same layers twice; build new ones in each call, or return a "
                "copy.deepcopy, so that each seed and method has its own"
            )
        _built.update(layers)
        return network


_built: weakref.WeakSet[nn.Module] = weakref.WeakSet()


COMPONENT = FunctionModel
