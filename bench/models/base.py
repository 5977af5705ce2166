"""The interface of models: a component has options and one method that builds the network."""

import abc
import dataclasses
import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from collectives.options import Incompatible, Options


@dataclasses.dataclass(kw_only=True)
class Model(Options, abc.ABC):
    """Base of all models: classifiers of 3x32x32 images, some of which also take other sizes.

    On the command line, a subclass has the name of its file, unless the class statement gives another name.
    """

    @abc.abstractmethod
    def build(self, num_classes: int) -> nn.Module:
        """Build the network with random weights, fp32, on the CPU, in training mode.

        The network maps normalised images, float [num_samples, 3, height, width], to logits, float [num_samples,
        num_classes]. Weights are drawn from torch's global generator, which the caller seeds, so that all ranks have
        equal weights.

        Args:
            num_classes: number of outputs.
        """


def check_images(network: nn.Module, name: str, image_size: int) -> None:
    """Check that a network can process images of `image_size`, by a forward pass on the meta device.

    Args:
        network: the network, on the meta device.
        name: the model's name, for the message.
        image_size: side of an image in pixels.

    Raises:
        Incompatible: the network can process images of 32x32 but not of this size: "linear cannot take images of 64x64
            (...)".
    """
    reason = _failure(network, image_size)
    if reason and _failure(network, 32) is None:  # otherwise perhaps it reads values, which the meta device lacks
        raise Incompatible(f"{name} cannot take images of {image_size}x{image_size} ({reason})")


def _failure(network: nn.Module, image_size: int) -> str | None:
    try:
        network(torch.empty(2, 3, image_size, image_size, device="meta"))
    except (RuntimeError, ValueError) as error:
        return " ".join(str(error).split()).rstrip(".")
    return None


def weights_hash(parameters: Iterable[torch.Tensor]) -> str:
    """Return a hash over the bits of all parameters, 32 hexadecimal digits, by which ranks compare their weights."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
