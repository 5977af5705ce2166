"""Choices made on a link are used when the link comes back, and for no other link."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from compressors.auto.candidates import MessageCost
from compressors.auto.choice import Pair
from compressors.auto.ranking import StepSeconds
from tests.extensions.auto.played import (
    Times,
    chosen,
    last_held,
)


def two_links(step: int) -> bool:
    """Return whether the link is the slow one at this step."""
    return step // 300 % 2 == 1


def per_byte_s(step: int) -> float:
    return 1e-5 if two_links(step) else 1e-9


@pytest.fixture
def measured_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Times]:
    """Replace the measurement of the link by its rate at the last step."""
    now = threading.local()  # a rank is a thread

    def measured_as(times: Times, per_byte_s: Callable[[int], float] = per_byte_s) -> Times:
        def measured(*_: object) -> MessageCost:
            return MessageCost(wave_s=1e-5, per_byte_s=per_byte_s(getattr(now, "step", 0)))

        def noted(step: int, pair: Pair) -> StepSeconds:
            now.step = step
            return times(step, pair)

        monkeypatch.setattr("compressors.auto.chooser.measure_link", measured)
        return noted

    return measured_as


NEAR_ON_BOTH = {"group_topk": (0.055, 0.08), "qsparse": (0.06, 0.055)}
"""compressor -> seconds of a step on the fast link, on the slow one"""


def takes_turns(step: int, pair: Pair) -> StepSeconds:
    fast_s, slow_s = NEAR_ON_BOTH.get(pair.compressor, (0.08, 0.4))
    return StepSeconds(slow_s + 0.1, 0.03, slow_s + 0.07) if two_links(step) else StepSeconds(fast_s, 0.05, 0.005)


@pytest.mark.parametrize("budget", [1.0, 1e-6])
def test_a_link_that_comes_back_is_known_and_needs_no_trials(budget: float, measured_at: Callable[..., Times]) -> None:
    first, second = chosen(measured_at(takes_turns), 2400, {"budget": budget})
    assert first == second
    for start in range(600, 2400, 300):
        late = [choice.of_layer(0) for choice in first[start + 100 : start + 300]]
        best = "qsparse" if two_links(start) else "group_topk"
        assert {part.pair.compressor for part in late if part.why != "tried"} == {best}
        assert "as earlier at this link speed" in last_held(first[: start + 300]).why
        tried = [choice.of_layer(0).pair.compressor for choice in first[start : start + 300]]
        assert set(tried) <= {"qsparse", "group_topk"}  # except for trials of the closest pair
    turns = [
        sum(choice.of_layer(0).why == "tried" for choice in first[start : start + 300]) for start in range(0, 2400, 300)
    ]
    assert 0 < sum(turns[4:]) <= sum(turns[2:4])  # trials remain as rare as they have become


def test_turns_while_the_link_is_another_one_tell_nothing_of_this_one(measured_at: Callable[..., Times]) -> None:
    def is_slow(step: int) -> bool:
        return step < 60 or step % 600 > 300

    def times(step: int, pair: Pair) -> StepSeconds:
        return takes_turns(300 if is_slow(step) else 0, pair)

    held = chosen(measured_at(times, lambda step: 1e-5 if is_slow(step) else 1e-9), 3000)[0]
    first = next(step for step, choice in enumerate(held) if "after the first" in choice.of_layer(0).why)
    assert 40 < first < 60  # the link changes before anything else happens
    assert not [step for step in range(62, first + 64) if held[step].of_layer(0).why == "tried"]
    for start in range(510, 2900, 600):  # the link is known to be slow at step 507
        assert {
            part.pair.compressor for choice in held[start : start + 90] if (part := choice.of_layer(0)).why != "tried"
        } == {"qsparse"}


def test_a_contest_in_which_the_link_became_another_stands_for_neither(measured_at: Callable[..., Times]) -> None:
    def is_slow(step: int) -> bool:
        return 30 <= step < 500

    def times(step: int, pair: Pair) -> StepSeconds:
        return takes_turns(300 if is_slow(step) else 0, pair)

    held = chosen(measured_at(times, lambda step: 1e-5 if is_slow(step) else 1e-9), 900, {"budget": 1.0})[0]
    fast_again = last_held(held[:880])
    assert fast_again.pair.compressor == "group_topk"
    assert "pairs tried" in fast_again.why
    assert "as earlier at this link speed" not in fast_again.why  # it was chosen by a new contest


def new_link(step: int) -> bool:
    return 600 <= step < 700 or step >= 2400


def times_with_a_new_link(step: int, pair: Pair) -> StepSeconds:
    half_s = 0.03 if pair.compressor == "bf16" else 0.04
    return StepSeconds(2 * half_s, half_s, half_s) if new_link(step) else takes_turns(step, pair)


@pytest.mark.parametrize(
    ("budget", "at_first", "later"), [(1.0, "bf16", "bf16"), (0.02, "qsparse", "bf16"), (1e-6, "qsparse", "qsparse")]
)
def test_a_link_that_is_not_known_waits_until_trials_can_be_afforded(
    budget: float, at_first: str, later: str, measured_at: Callable[..., Times]
) -> None:
    asked = []

    def seconds_of_a_byte(step: int) -> float:
        asked.append(step)
        return 1e-6 if new_link(step) else per_byte_s(step)

    held = chosen(measured_at(times_with_a_new_link, seconds_of_a_byte), 2700, {"budget": budget})[0]
    assert last_held(held[:700]).pair.compressor == at_first
    assert last_held(held[:2650]).pair.compressor == later
    assert len([step for step in asked if step >= 2400]) <= 4  # from two ranks


def test_a_contest_that_ends_on_a_known_link_takes_nothing_from_what_is_known(
    measured_at: Callable[..., Times],
) -> None:
    def times(step: int, pair: Pair) -> StepSeconds:
        return times_with_a_new_link(step if step < 690 else 300, pair)

    def seconds_of_a_byte(step: int) -> float:
        return 1e-6 if 600 <= step < 690 else per_byte_s(step if step < 690 else 300)

    held = chosen(measured_at(times, seconds_of_a_byte), 900, {"budget": 1.0})[0]
    assert held[690].of_layer(0).why == "tried"
    assert last_held(held).pair.compressor == "qsparse"
    assert "40 ms a step, as earlier at this link speed" in last_held(held[:830]).why


def test_contests_that_change_nothing_become_rare(measured_at: Callable[..., Times]) -> None:
    def restless(step: int, pair: Pair) -> StepSeconds:
        return StepSeconds(*((1 + step // 150 % 2) * each for each in takes_turns(0, pair)))

    held = chosen(measured_at(restless, lambda step: 1e-9), 2400, {"budget": 1.0})[0]
    tried = [step for step, choice in enumerate(held) if choice.of_layer(0).pair.compressor == "bf16"]
    assert not [step for step in tried if step > 1600]  # each pause is twice as long as the previous one


def test_a_link_is_not_asked_again_and_again_why_steps_take_longer(measured_at: Callable[..., Times]) -> None:
    asked = []

    def slower(step: int, pair: Pair) -> StepSeconds:
        return StepSeconds(*(2 * each for each in takes_turns(0, pair))) if step > 300 else takes_turns(0, pair)

    chosen(measured_at(slower, lambda step: asked.append(step) or 1e-9), 900, {"budget": 1e-6})
    assert len([step for step in asked if step > 300]) == 2  # once by each rank


def test_what_is_known_of_a_link_gives_way_where_steps_do_not_bear_it_out(
    measured_at: Callable[..., Times],
) -> None:
    def later_otherwise(step: int, pair: Pair) -> StepSeconds:
        seconds = takes_turns(step, pair)
        return StepSeconds(*(3 * each for each in seconds)) if step > 900 and pair.compressor == "qsparse" else seconds

    held = chosen(measured_at(later_otherwise), 1800, {"budget": 1.0})[0]
    assert "as earlier at this link speed" in last_held(held[:930]).why
    assert last_held(held[:1200]).pair.compressor == "group_topk"  # after new trials
    assert "steps went from 155 ms to 465 ms" in last_held(held[:1200]).why
    assert last_held(held[:1790]).pair.compressor == "group_topk"  # and it is the known choice from then on
    assert "as earlier at this link speed" in last_held(held[:1790]).why


def test_what_is_known_of_a_link_counts_no_more_when_sparse_pairs_send_fewer_entries(
    measured_at: Callable[..., Times],
) -> None:
    def times(step: int, pair: Pair) -> StepSeconds:
        is_fast = pair.compressor == "bf16" if step < 600 else "sparse" in pair.compressor
        step_s = (0.1 if is_fast else 0.3) * (3 if two_links(step) else 1)
        return StepSeconds(step_s, 0.03, step_s - 0.03)

    held = chosen(measured_at(times), 1200, {"budget": 1e-6}, steps_per_epoch=600)[0]
    assert last_held(held[:600]).pair.compressor == "bf16"
    assert "sparse" in last_held(held[:900]).pair.compressor
    assert "sparse" in last_held(held).pair.compressor
    assert not any("as earlier at this link speed" in choice.of_layer(0).why for choice in held[900:])
