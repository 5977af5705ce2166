"""The policy for NaN and infinity, the vote, and the one warning of a missing epoch."""

from __future__ import annotations

import pytest
import torch

from gradwire import step_guard
from gradwire.step_guard import Nonfinite, NonFiniteGradient, StepGuard


@pytest.mark.parametrize(
    ("nonfinite", "left", "leave_out"),
    [("skip", [0.0, 0.0], True), ("raise", [0.0, 0.0], True), ("zero", [1.0, 0.0], False)],
)
def test_nothing_that_is_not_finite_gets_through(nonfinite: Nonfinite, left: list[float], leave_out: bool) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        guard, sound, tensor = StepGuard(nonfinite), torch.ones(2), torch.tensor([1.0, bad])
        assert guard.screen_([sound, tensor]) is guard.saw_nonfinite is leave_out
        assert tensor.tolist() == left
        assert sound.tolist() == [1.0, 1.0]


def test_finite_tensors_are_checked_at_once_even_if_their_norm_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(tensor: torch.Tensor) -> bool:
        one_by_one.append(tensor)
        return bool(tensor.isfinite().all())

    one_by_one: list[torch.Tensor] = []
    monkeypatch.setattr(step_guard, "is_finite", check)
    for value, num_checks in ((1.0, 0), (3e38, 2)):
        tensors = [torch.full((2,), value) for _ in range(2)]
        assert not StepGuard("skip").screen_(tensors)
        assert len(one_by_one) == num_checks
        assert all(tensor.tolist() == torch.full((2,), value).tolist() for tensor in tensors)


def test_ranks_vote_on_what_was_seen_since_the_last_vote_but_not_on_zeros() -> None:
    for nonfinite, flags in (("skip", [True, False]), ("zero", [])):
        guard, sent = StepGuard(nonfinite), list[bool]()
        guard.screen_([torch.tensor([float("nan")])])
        for _ in range(2):
            guard.start_vote(lambda flag, sent=sent: sent.append(flag) or (lambda: flag))()
        assert sent == flags


def test_only_who_wants_an_error_gets_one() -> None:
    StepGuard("skip").skip("a gradient was not finite")
    with pytest.raises(NonFiniteGradient, match="a gradient was not finite"):
        StepGuard("raise").skip("a gradient was not finite")
