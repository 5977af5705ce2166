"""`StepGuard`: the checks before and after the exchange of every step, whatever is exchanged.

Hooks, local steps and strategies count steps with it, replace NaN and infinity before they reach residuals, let all
ranks decide alike whether a step counts, and compare the model with what they were attached to.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from compressors.base import Compressor
from compressors.parts.buckets import is_finite
from gradwire.attached import Attached

Nonfinite = Literal["skip", "raise", "zero"]


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
