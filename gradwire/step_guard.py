"""`StepGuard`: the checks before and after the exchange of every step, whatever is exchanged.

Hooks, local steps and strategies count steps with it, replace NaN and infinity before they reach residuals, let all
ranks decide alike whether a step counts, and compare the model with what they were attached to (`Attached`): a hook
takes the parameters of a model once, so a layer that is unfrozen, appended or replaced later would never be exchanged,
and ranks would differ without a word.
"""

import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from compressors.base import Compressor
from compressors.parts.buckets import is_finite

Nonfinite = Literal["skip", "raise", "zero"]
Kind = tuple[torch.dtype, torch.device, torch.Size]


class Attached:
    """Compare a model and its optimizers with what they were at the last comparison.

    As long as nothing changes, a comparison takes about 40 µs for ResNet-18 (62 parameters) and 90 µs for ResNet-50
    (161 parameters).

    Args:
        model: the network.
        explain: called at the first comparison, and when something has changed: returns the sentence for the user, or
            None if the hook can go on.

    Attributes:
        optimizers: those whose groups are compared, too.
    """

    def __init__(self, model: nn.Module, explain: Callable[[], str | None]) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._model, self._explain = model, explain
        self._tables: list[dict[str, Any]] = []  # the parameters, and the children, of every module
        self._parameters: list[nn.Parameter] = []
        self._held: list[object] = []  # alive, so that nothing else can have its identity
        self._was: object = None
        self._handles: list[RemovableHandle] = []

    def watch(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        before_update: Callable[..., Any],
        after_update: Callable[..., Any] | None = None,
    ) -> None:
        """Compare these optimizers as well, and call functions before and after every `step` of theirs."""
        self.optimizers += optimizers
        self._handles += [each.register_step_pre_hook(before_update) for each in optimizers]
        if after_update is not None:
            self._handles += [each.register_step_post_hook(after_update) for each in optimizers]

    def close(self) -> None:
        """Call no functions any more."""
        for handle in self._handles:
            handle.remove()

    def change(self) -> str | None:
        """Return a sentence that says what has changed and what to do; None if the hook can go on."""
        if self._now() == self._was:
            return None
        if reason := self._explain():
            return reason
        self._tables = [table for module in self._model.modules() for table in (module._parameters, module._modules)]
        self._parameters = list(self._model.parameters())
        self._held = list(self._members())
        self._was = self._now()
        return None

    def _now(self) -> object:
        kinds = [(each.requires_grad, each.dtype, each.device, each.shape) for each in self._parameters]
        return list(map(id, self._members())), kinds

    def _members(self) -> Iterator[object]:
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        return itertools.chain(*map(dict.values, self._tables), *groups)


class NonFiniteGradient(RuntimeError):
    """A gradient contained NaN or infinity, and `nonfinite` is "raise"."""


class StepGuard:
    """The number of the step and its epoch, the policy for NaN and infinity, and what must not change.

    Args:
        nonfinite: what to do about NaN or infinity: "skip" the step, "raise", or "zero" the elements.

    Attributes:
        index: steps that were begun before.
        epoch: number of finished epochs; None until `set_epoch` is called.
        closed: True after `close`.
        attached: what the model is compared with; None if nothing is compared.
        saw_nonfinite: True if this rank has replaced NaN or infinity since the last vote, and the step must be skipped.
    """

    def __init__(self, nonfinite: Nonfinite) -> None:
        self.index = 0
        self.epoch: int | None = None
        self.closed = self.saw_nonfinite = False
        self.attached: Attached | None = None
        self._nonfinite = nonfinite
        self._epoch_is_missing_for: Compressor | None = None

    def attach(
        self, model: nn.Module, explain: Callable[[], str | None], compressor: Compressor, rank: int
    ) -> Attached:
        """Compare a model of the user's own in every step, and let rank 0 warn if the compressor needs the epoch.

        Args:
            model: the network.
            explain: see `Attached`.
            compressor: compresses the model's gradients.
            rank: this rank.
        """
        self.attached = Attached(model, explain)
        self._epoch_is_missing_for = compressor if rank == 0 and compressor.traits.denser_epochs > 0 else None
        return self.attached

    def set_epoch(self, epoch: int | None) -> None:
        """Set the number of finished epochs; None if each step says its own."""
        self.epoch = epoch
        self._epoch_is_missing_for = None

    def check(self) -> None:
        """Check once per step that nothing has changed, and warn once if the compressor needs the epoch.

        Raises:
            RuntimeError: the model or its optimizers have changed.
        """
        self.check_unchanged()
        compressor, self._epoch_is_missing_for = self._epoch_is_missing_for, None
        if compressor is not None:
            warnings.warn(
                f"{compressor.component_name} sends more in its first {compressor.traits.denser_epochs} epochs only if "
                "hook.set_epoch(epoch) is called before each; call it, or set warmup_epochs=0 or warmup_steps=N",
                stacklevel=4,
            )

    def check_unchanged(self) -> None:
        """Check that the model and its optimizers are what they were, as far as the hook cannot follow.

        Raises:
            RuntimeError: they are not.
        """
        if self.attached is not None and not self.closed and (reason := self.attached.change()):
            raise RuntimeError(reason)

    def screen_(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Replace NaN and infinity in place, because residuals that contain them would never recover.

        Args:
            tensors: floating tensors. If one is not finite, with "zero" its non-finite elements become 0, otherwise all
                its elements do.

        Returns:
            True if the step must be skipped for one of these tensors.
        """
        if are_finite(tensors):
            return False
        must_skip = False
        for tensor in tensors:
            if is_finite(tensor):
                continue
            if self._nonfinite == "zero":
                torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)
            else:
                tensor.zero_()
                must_skip = True
        self.saw_nonfinite |= must_skip
        return must_skip

    def start_vote(self, start_on_any_rank: Callable[[bool], Callable[[], bool]]) -> Callable[[], bool]:
        """Send what `screen_` has seen, and return a function that waits and returns True if all ranks skip the step.

        Every rank must call this method, and the returned function once. With "zero" nothing is sent.

        Args:
            start_on_any_rank: the method of the communicator that sends.
        """
        if self._nonfinite == "zero":
            return lambda: False
        flag, self.saw_nonfinite = self.saw_nonfinite, False
        return start_on_any_rank(flag)

    def skip(self, reason: str) -> None:
        """Call it when a step is skipped.

        Raises:
            NonFiniteGradient: `nonfinite` is "raise"; its text is the reason.
        """
        if self._nonfinite == "raise":
            raise NonFiniteGradient(reason)


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if all elements of all tensors are finite."""
    # One check of many, because a GPU is waited for at each. Norms of finite tensors may overflow.
    if len(tensors) > 1 and bool(torch.isfinite(torch.stack(torch._foreach_norm(list(tensors)))).all()):
        return True
    return all(map(is_finite, tensors))


def kind_of(tensor: torch.Tensor) -> Kind:
    """Return what a parameter and its gradient must have in common."""
    return tensor.dtype.to_real(), tensor.device, tensor.shape


def changed_parameter(
    model: nn.Module,
    was: Mapping[int, Kind],
    *,
    since: str,
    advice: str,
    ignored: Collection[str] = (),
    may_freeze: bool = False,
) -> str | None:
    """Return a sentence about the first parameter that is not what it was; None if all are.

    Args:
        model: the network.
        was: the kinds of the parameters that are exchanged, by id.
        since: what happened to the model then, such as "the model was wrapped".
        advice: what to do.
        ignored: names of the parameters that are not exchanged on purpose.
        may_freeze: True if a frozen parameter is no harm.
    """
    for name, parameter in model.named_parameters():
        before, now = was.get(id(parameter)), kind_of(parameter)
        if before is None:
            if parameter.requires_grad and name not in ignored:
                return f"{name} was added, replaced or unfrozen after {since}; {advice}"
        elif not (parameter.requires_grad or may_freeze):
            return f"{name} was frozen after {since}; {advice}"
        elif before != now:
            return f"{name} was {_text(before)} when {since} and is {_text(now)}; {advice}"
    return None


def unknown_parameter(optimizers: Iterable[torch.optim.Optimizer], known: Collection[int]) -> torch.Tensor | None:
    """Return the first parameter that an optimizer may update and whose id is not known; None if there is none."""
    updated = (parameter for optimizer in optimizers for parameter in parameters_of(optimizer))
    return next((each for each in updated if each.requires_grad and id(each) not in known), None)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def checked_optimizers(given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return one or several optimizers as a list, and check that the hooks of their `step` are called.

    Raises:
        ValueError: one does not call them, because it only wraps another optimizer.
    """
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    for each in optimizers:
        if not getattr(type(each).step, "hooked", False):  # set by torch.optim.Optimizer.__init__
            raise ValueError(
                f"the step of {type(each).__name__} does not call the hooks of torch.optim.Optimizer; give the "
                "optimizer inside it"
            )
    return optimizers


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of an optimizer's `step`, the first of which is the optimizer."""
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure


def after_closure(check: Callable[[torch.optim.Optimizer], object]) -> Callable[..., tuple[Any, Any] | None]:
    """Return a hook for an optimizer's `step` that calls `check` when there are gradients: a closure makes them."""

    def before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = closure_of(args, kwargs)
        if closure is None:
            check(optimizer)
            return None

        def checked() -> Any:
            loss = closure()
            check(optimizer)
            return loss

        return (optimizer, checked), {}

    return before_update


def _text(kind: Kind) -> str:
    dtype, device, shape = kind
    return f"{dtype} {list(shape)} on {device}"
