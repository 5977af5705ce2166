"""Find the parameters whose gradients DistributedDataParallel reduces, and use large gradients without a copy."""

import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from compressors.layer import Layer, layers_of
from gradwire.step_guard import Kind, changed_parameter, kind_of


def reduced_layers(ddp: DistributedDataParallel) -> list[Layer]:
    """Return the trainable parameters whose gradients DDP reduces, with the ids that `layers_of` gives them."""
    reduced = reduced_kinds(ddp)
    return [layer for layer in layers_of(ddp.module) if id(layer.weight) in reduced]


def reduced_kinds(ddp: DistributedDataParallel) -> dict[int, Kind]:
    """Return, by id, the `kind_of` (dtype, device, shape) that each reduced parameter had when DDP made its buckets."""
    return {
        id(parameter): kind_of(gradient)
        for bucket in ddp.reducer._get_zeros_like_grad_buckets()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    }


def change_since_wrapping(
    ddp: DistributedDataParallel, was: Mapping[int, Kind], *, may_freeze: bool = False
) -> str | None:
    """Return a message about a parameter whose gradient DDP misses, because it was changed after the wrapping in DDP.

    Return None if there is no such parameter.

    Args:
        ddp: the model.
        was: the model's `reduced_kinds` from before any change; call that function early, because DDP makes its buckets
            again after the first step.
        may_freeze: True to return no message about frozen parameters, because DDP has reduced zeros for them.
    """
    return changed_parameter(
        ddp.module,
        was,
        since="the model was wrapped",
        advice="do that first, then wrap the model in DDP",
        ignored=ddp.parameters_to_ignore,
        may_freeze=may_freeze,
    )


def why_missing(
    ddp: DistributedDataParallel, was: Mapping[int, Kind], layers: Sequence[Layer], call: str, *, has_begun: bool
) -> str:
    """Return a message that says why DDP has not handed over all gradients of a step, and what the user should do.

    Args:
        ddp: the model.
        was: as in `change_since_wrapping`.
        layers: every parameter that DDP reduces.
        call: the call that ends a step, such as "optimizer.step()".
        has_begun: True if DDP has handed over some gradients.
    """
    if reason := change_since_wrapping(ddp, was):
        return reason
    without = [layer.name for layer in layers if layer.weight is not None and layer.weight.grad is None]
    if has_begun or 0 < len(without) < len(layers):
        return (
            f"backward() gave {[*without, 'some parameter'][0]} no gradient, so DDP did not finish; "
            "wrap the model with find_unused_parameters=True"
        )
    return (
        f"no gradient came through DDP since the last {call}; call ddp(x), not model(x), leave the last "
        f"backward() of a step outside no_sync(), and call {call} once per step; if the network is trained without "
        "this hook now, call its close()"
    )


# Smallest number of elements for which avoiding a copy saves time.
WORTH_TAKING = 1 << 15


class ZeroCopyGradients:
    """Takes large gradients on CPUs directly from backward, so that DDP does not copy them into its buckets.

    Gradients on GPUs are not taken, because a copy is cheap there and memory is scarce. On CPUs, a gradient is not
    taken if DDP does not exchange it (inside `no_sync`), if it is added to an existing `grad`, if something else
    references its memory (an autograd function may write its next gradient there), or if its parameter has a hook from
    `register_post_accumulate_grad_hook`. After a gradient was taken, any other hook that reads the parameter's `grad`
    sees old contents.

    Args:
        ddp: the model.
        enabled: False to take no gradients. Without `gradient_as_bucket_view` no gradients are taken in any case.
    """

    def __init__(self, ddp: DistributedDataParallel, *, enabled: bool = True) -> None:
        enabled = enabled and ddp.gradient_as_bucket_view
        self._ddp = ddp
        self._taken: dict[nn.Parameter, torch.Tensor] = {}
        self._places: dict[nn.Parameter, torch.Tensor] = {}
        self._is_expected = False
        self._sole_owners = _sole_owners() if enabled else set()
        self._handles = [ddp.register_forward_pre_hook(self._expect)] if enabled else []
        for parameter in ddp.module.parameters() if enabled else ():
            if parameter.requires_grad and parameter.numel() >= WORTH_TAKING and parameter.device.type == "cpu":
                # This node accumulates gradients: tensor hooks run before it, and `torch.autograd.grad` skips it.
                accumulator = get_gradient_edge(parameter).node
                self._handles.append(accumulator.register_prehook(functools.partial(self._take, parameter)))

    def of(self, bucket: dist.GradBucket) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # type: ignore[name-defined]
        """Return a bucket's flat gradients, which the caller must not change, and flat tensors for its updates."""
        parameters, places = bucket.parameters(), bucket.gradients()
        self._places.update(zip(parameters, places, strict=True))
        self._is_expected &= not bucket.is_last()
        updates = [place.flatten() for place in places]
        if self._taken.keys().isdisjoint(parameters):
            return updates, updates
        taken = [self._taken.pop(parameter, None) for parameter in parameters]
        return [
            update if gradient is None else gradient.view(-1) for gradient, update in zip(taken, updates, strict=True)
        ], updates

    def close(self) -> None:
        """Remove the hooks that take gradients; DDP then copies all gradients into its buckets again."""
        for handle in self._handles:
            handle.remove()
        self._taken.clear()
        self._places.clear()

    def _expect(self, *_: Any) -> None:
        # before forward: will DDP exchange the gradients of the next backward?
        self._is_expected = self._ddp.require_backward_grad_sync and torch.is_grad_enabled()

    def _take(self, parameter: nn.Parameter, gradients: tuple[torch.Tensor | None]) -> tuple[torch.Tensor] | None:
        """Take a gradient before autograd accumulates it.

        Return the tensor that autograd must accumulate instead; None if the gradient was not taken.
        """
        (gradient,), place = gradients, self._places.get(parameter)
        if (first := self._taken.pop(parameter, None)) is not None and place is not None:
            place.copy_(first)  # a static graph allows a second gradient, which is now added to the first
            return None
        if (
            gradient is None
            or place is None
            or not self._is_expected
            or torch.is_grad_enabled()
            or parameter.grad is not None
            or parameter._post_accumulate_grad_hooks
            or gradient.dtype != place.dtype
            # DDP's views have the strides of the parameters
            or not (gradient.is_contiguous() and parameter.is_contiguous())
            or _owners(gradient) not in self._sole_owners
        ):
            return None
        self._taken[parameter] = gradient
        return (place.detach(),)  # a new view, because autograd would copy one that is referenced elsewhere


def _owners(gradient: torch.Tensor) -> tuple[int, ...]:
    """Return the numbers of references to a gradient, to its memory and, if it is a view, to the viewed tensor."""
    memory, base = gradient.untyped_storage(), gradient._base
    if not memory.resizable():
        return ()  # it belongs to NumPy or another library
    counts = (
        *(sys.getrefcount(gradient), _use_count(gradient)),
        *(sys.getrefcount(memory), torch._C._storage_Use_Count(memory._cdata)),
    )
    return counts if base is None else (*counts, sys.getrefcount(base), _use_count(base))


# the number of references in C++, including the Python object's; not in torch's type hints
_use_count = operator.methodcaller("_use_count")


@functools.cache
def _sole_owners() -> set[tuple[int, ...]]:
    """Return the `_owners` of two gradients that only autograd references: a view, and a tensor that is no view."""
    found = set()

    def take(gradients: tuple[torch.Tensor | None]) -> None:
        (gradient,) = gradients
        assert gradient is not None
        found.add(_owners(gradient))

    for use in (torch.t, torch.neg):
        weight = nn.Parameter(torch.zeros(2, 2))
        accumulator = get_gradient_edge(weight).node  # lives as long as this reference
        accumulator.register_prehook(take)
        with torch.enable_grad():
            (use(weight) * torch.ones(2, 2)).sum().backward()
    return found
