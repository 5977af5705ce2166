"""The interface of models: a component has options and one method that builds the network."""

import abc
import dataclasses
import hashlib
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from typing_extensions import override

from collectives.options import Incompatible, Options


@dataclasses.dataclass(kw_only=True)
class Model(Options, abc.ABC):
    """Base of all models; most built-in ones classify 3x32x32 images, and some also take other sizes.

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
        """Raise Incompatible, with one sentence, if the network cannot process such inputs, as far as is known."""


@dataclasses.dataclass(kw_only=True)
class TextModel(Model, abc.ABC):
    """Base of models that predict the next byte at each position of a text from the bytes up to there.

    The network maps bytes, int64 [num_samples, context], to logits, float [num_samples, context, num_classes].
    """

    @property
    def longest(self) -> int | None:
        """Return the most bytes that the network can process at once; None: any number."""
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


def try_forward(network: nn.Module, name: str, inputs: torch.Tensor) -> object:
    """Return what a network returns for some inputs, without gradients.

    Args:
        network: the network.
        name: the model's name, for the message.
        inputs: a batch of what the network gets, on the network's device.

    Raises:
        Incompatible: the network cannot process inputs of this shape: "linear cannot take inputs of 3x64x64 (...)".
    """
    try:
        with torch.no_grad():
            return cast(object, network(inputs))
    except Exception as error:  # noqa: BLE001 - a user's network may raise anything
        shape, reason = "x".join(map(str, inputs.shape[1:])), " ".join(str(error).split()).rstrip(".")
        raise Incompatible(f"{name} cannot take inputs of {shape} ({reason})") from None


def weights_hash(parameters: Iterable[torch.Tensor]) -> str:
    """Return a hash over the bits of all parameters, 32 hexadecimal digits, by which ranks compare their weights."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
