"""The interface of models: a component consists of options and a method that builds the network."""

import abc
import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import nn
from typing_extensions import override

from bench.core import spec
from bench.core.errors import UsageError
from bench.core.functions import seed_generators
from bench.core.processes import own_rank
from collectives.options import Incompatible, Options


@dataclasses.dataclass(kw_only=True)
class Model(Options, abc.ABC):
    """Base of all models; most built-in models classify 3x32x32 images, and some also take other sizes.

    On the command line, a subclass has the name of its file, unless the class statement gives another name.
    """

    @abc.abstractmethod
    def build(self, num_classes: int) -> nn.Module:
        """Build the network with random weights, fp32, on the CPU, in training mode.

        The network maps normalised inputs, such as images, float [num_samples, 3, height, width], to logits, float
        [num_samples, num_classes]. Weights are drawn from torch's global generator, which the caller seeds, so that all
        ranks have equal weights.

        Args:
            num_classes: number of outputs.
        """

    def check_inputs(self, inputs: torch.Tensor) -> None:
        """Raise Incompatible if this model is known to be unable to process such inputs."""


@dataclasses.dataclass(kw_only=True)
class TextModel(Model, abc.ABC):
    """Base of models that predict, at each position of a text, the next byte from the bytes up to this position.

    The network maps bytes, int64 [num_samples, context], to logits, float [num_samples, context, num_classes].
    """

    @property
    def longest(self) -> int | None:
        """Return the largest number of bytes that the network can process at once; None: no limit."""
        return None

    @override
    def check_inputs(self, inputs: torch.Tensor) -> None:
        name, given = self.component_name, inputs.shape[-1]
        if inputs.dim() != 2 or inputs.is_floating_point():
            raise Incompatible(f"{name} predicts the bytes of a text, which this data set is not; use --dataset stdlib")
        if self.longest is not None and given > self.longest:
            raise Incompatible(
                f"{name} has context={self.longest}, and the data set's context={given} is longer; give "
                f"{name}:context={given}, or give the data set context={self.longest}"
            )


class HasInputs(Protocol):
    """The part of a data set's interface that is needed to build a network."""

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""

    def dummy_batch(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        """Return zeros with the shape and dtype of a batch of the network's inputs."""


def build_network(model: Model, data: HasInputs) -> nn.Module:
    """Build the network for a data set; torch's lazy modules get their shapes from a batch of zeros.

    Raises:
        Incompatible: the network cannot process the batch, has no parameters to train, or has a lazy module that the
            forward pass does not use.
    """
    network = model.build(data.num_classes)
    if _lazy_names(network) or not list(network.parameters()):  # refuses networks that make parameters in forward
        device = torch.get_default_device()
        with torch.device("cpu"):
            if device.type == "meta":
                network = model.build(data.num_classes)  # because forward may need values
            network.eval()  # so that running statistics do not change
            try_forward(network, model.component_name, data.dummy_batch(2, "cpu"))
            network.train()
        if names := _lazy_names(network):
            raise Incompatible(
                f"{model.component_name} has parameters without a shape that one forward pass does not use "
                f"({', '.join(names)}); give their modules the number of inputs"
            )
        network = network.to(device)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise Incompatible(
            f"{model.component_name} has no parameters to train; use a network with some that need gradients"
        )
    return network


def _lazy_names(network: nn.Module) -> list[str]:
    return [
        name for name, tensor in (*network.named_parameters(), *network.named_buffers()) if nn.parameter.is_lazy(tensor)
    ]


def seeded_network(model: str, data: HasInputs, seed: int) -> nn.Module:
    """Build the network for a seed, with the same weights on every rank.

    Afterwards the global random generators of Python and numpy give different numbers on each rank; torch's generator
    gives the same numbers on all ranks.

    Args:
        model: spec of the model.
        data: the data set.
        seed: the run's seed.
    """
    torch.manual_seed(seed)
    seed_generators(seed)
    network = build_network(spec.build("models", model), data)
    seed_generators(seed, own_rank())
    return network


def try_forward(network: nn.Module, name: str, inputs: torch.Tensor) -> object:
    """Run a network, and return its output for some inputs, from which gradients can be computed.

    Args:
        network: the network.
        name: the model's name, for the message.
        inputs: a batch of inputs, on the network's device.

    Raises:
        Incompatible: the network cannot process inputs of this shape: "linear cannot take inputs of 3x64x64 (...)".
        UsageError: the network makes parameters while it processes its first inputs.
    """
    built = set(network.state_dict())
    try:
        with warnings.catch_warnings(action="ignore"):  # training shows them again
            outputs = cast(object, network(inputs))
    except Exception as error:  # noqa: BLE001 - a user's network may raise anything
        shape = "x".join(map(str, inputs.shape[1:])) or "a single number"
        dtype = "" if inputs.dtype == torch.float32 else f" in {inputs.dtype}"
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split()).rstrip(".")
        raise Incompatible(f"{name} cannot take inputs of {shape}{dtype} ({reason})") from None
    if late := set(network.state_dict()) - built:
        raise UsageError(
            f"{name} makes {', '.join(sorted(late))} in its first forward pass, after the optimizer has got the "
            "network's parameters; make it while the network is built, for example as a lazy module of torch"
        )
    return outputs


def pooled_buffers(
    buffers: Mapping[str, torch.Tensor],
    variances: Collection[str],
    average: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Combine the replicas' floating-point buffers, by name, into one set: return their means over replicas.

    Because replicas see different samples, the running variance of a BatchNorm becomes the variance of all samples: the
    mean of the variances plus the variance of the means.

    Args:
        buffers: the buffers of one replica, or those of all replicas, stacked along a first dimension.
        variances: names of the running variances of BatchNorm.
        average: function that returns the means over replicas of such tensors.
    """
    others = [name for name, buffer in buffers.items() if buffer.is_floating_point() and name not in variances]
    pooled = dict(zip(others, average([buffers[name] for name in others]), strict=True))
    mean_of = {name: f"{name.removesuffix('var')}mean" for name in buffers if name in variances}
    spread = [buffers[name] + (buffers[mean] - pooled[mean]) ** 2 for name, mean in mean_of.items()]
    return pooled | dict(zip(mean_of, average(spread), strict=True))
