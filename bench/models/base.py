"""What a model component is: options and one method that builds the network."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from collectives.options import Options


@dataclasses.dataclass(kw_only=True)
class Model(Options, abc.ABC):
    """A network for 3x32x32 images. One file, one class, named after the file."""

    @abc.abstractmethod
    def build(self, num_classes: int) -> nn.Module:
        """The network with freshly drawn weights, fp32, on the CPU, in training mode.

        It maps normalised images, float [num_samples, 3, 32, 32], to logits, float [num_samples, num_classes].

        Args:
            num_classes: number of outputs.

        Draws from torch's global generator: the caller has seeded it, so that every rank builds the same weights.
        """


def weights_hash(parameters: Iterable[torch.Tensor]) -> str:
    """A hash over the bits of all parameters: equal on two ranks exactly if the parameters are."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
