"""ZeroCopyGradients: gradients read where backward leaves them, instead of copied into DDP's buckets first.

Autograd is given, in a gradient's place, the part of the bucket that DDP would copy it to; DDP finds the gradient where
it wants it and copies nothing. What lies there is of the step before, until the exchange writes the update: an exchange
reads what was taken.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

# Elements; a copy of fewer takes no longer than the call that saves it.
WORTH_TAKING = 1 << 15


class ZeroCopyGradients:
    """The gradients of a backward that are still to be exchanged.

    Taken is what lies on a CPU: on a GPU a copy is cheap, and memory is not. What DDP does not exchange, as inside
    `no_sync`, and what is added to a gradient that is there already go their usual way, and so does what a hook behind
    the accumulation wants to see, if `register_post_accumulate_grad_hook` made it: others find the place of a gradient
    that was taken, and in it what was there before.

    Args:
        ddp: with gradient_as_bucket_view; of one without it, no gradient is taken.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._taken: dict[nn.Parameter, torch.Tensor] = {}
        self._places: dict[nn.Parameter, torch.Tensor] = {}
        self._is_expected = False
        self._handles = [ddp.register_forward_pre_hook(self._expect)] if ddp.gradient_as_bucket_view else []
        for parameter in ddp.module.parameters() if ddp.gradient_as_bucket_view else ():
            if parameter.requires_grad and parameter.numel() >= WORTH_TAKING and parameter.device.type == "cpu":
                # Where gradients are accumulated: `torch.autograd.grad` does not come by, tensors' own hooks have been.
                accumulates = get_gradient_edge(parameter).node
                self._handles.append(accumulates.register_prehook(functools.partial(self._take, parameter)))

    def of(self, bucket: dist.GradBucket) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # type: ignore[name-defined]
        """(a bucket's gradients, flat, some of which nobody may change; where their updates go)."""
        parameters, places = bucket.parameters(), bucket.gradients()
        self._places.update(zip(parameters, places, strict=True))
        self._is_expected &= not bucket.is_last()
        updates = [place.flatten() for place in places]
        taken = [self._taken.pop(parameter, None) for parameter in parameters]
        if not any(gradient is not None for gradient in taken):
            return updates, updates
        gradients = [
            update if gradient is None else gradient.view(-1) for gradient, update in zip(taken, updates, strict=True)
        ]
        return gradients, updates

    def close(self) -> None:
        """Let gradients go their usual way again."""
        for handle in self._handles:
            handle.remove()
        self._taken.clear()
        self._places.clear()

    def _expect(self, *_: Any) -> None:
        """Before forward: whether DDP will exchange what the next backward makes."""
        self._is_expected = self._ddp.require_backward_grad_sync and torch.is_grad_enabled()

    def _take(self, parameter: nn.Parameter, gradients: tuple[torch.Tensor | None]) -> tuple[torch.Tensor] | None:
        """Before a gradient is accumulated: what is to be instead, or None."""
        (gradient,), place = gradients, self._places.get(parameter)
        if (first := self._taken.pop(parameter, None)) is not None and place is not None:
            place.copy_(first)  # another is added to it now, as a static graph allows
            return None
        if (
            gradient is None
            or place is None
            or not self._is_expected
            or torch.is_grad_enabled()
            or parameter.grad is not None
            or parameter._post_accumulate_grad_hooks
            or gradient.dtype != place.dtype
            or not (gradient.is_contiguous() and parameter.is_contiguous())  # places have the parameters' own strides
        ):
            return None
        self._taken[parameter] = gradient
        return (place.detach(),)  # a view of its own: autograd would copy one that others hold as well
