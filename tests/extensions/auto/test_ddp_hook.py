"""`attach` with `auto`: pairs are tried and chosen on real gloo ranks, and a closed hook leaves nothing behind."""

from __future__ import annotations

import json
import tempfile
import time
from typing import Any, cast

import pytest
import torch

from compressors.auto.choice import Choice
from compressors.auto.compressor import ChoosingHook
from gradwire.ddp.attach import attach
from tests.testing.ddp_scenes import (
    LR,
    grows,
    held_after_each,
    loss_of,
    played_by_two,
    train,
    warnings_of,
    weights,
    wrapped,
)

PAUSE_S = 1.0

pytestmark = pytest.mark.xdist_group("ddp hook that chooses")  # its ranks run once for all tests


def chosen(rank: int) -> dict[str, Any]:
    """Train thirty steps in which pairs are tried, and repeat the choices with a state saved in between."""
    first = wrapped()
    hook = cast(ChoosingHook, attach(first, "auto", "ring"))
    optimizer = torch.optim.SGD(first.parameters(), lr=LR)
    held: list[Choice] = []
    told_s = []
    for step in range(30):
        if step == 20:
            time.sleep(PAUSE_S)
            hook.end_pause()
        loss_of(first, rank, step).backward()
        choice = cast(Choice, hook.finish_step().decision)
        told_s.append(hook._own.step_s)
        assert choice is not None
        held += [] if choice in held else [choice]
        optimizer.step()
        optimizer.zero_grad()
    hook.close()
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(choice.to_dict()) + "\n" for choice in held))
        file.flush()
        second, third = wrapped(), wrapped()
        hook = cast(ChoosingHook, attach(second, f"auto:choices={file.name}", "ring"))
        train(second, hook, range(12))
        third.load_state_dict(second.state_dict())
        later = attach(third, f"auto:choices={file.name}", "ring")
        later.load_state_dict(hook.state_dict())
        recorded = [choice.to_dict() for choice in held[:1]]  # as in a run that recorded only the first choice
        cast(ChoosingHook, later).replay(recorded)
        hook.close()
        again = train(third, later, range(12, 30))
        later.close()
    ways = [choice.to_dict() for choice in held]
    return {"weights": weights(first), "again": again, "ways": ways, "told_s": told_s}


def comings_and_goings(_: int) -> list[tuple[int, int]]:
    return held_after_each(("auto", "ring"))


def warned(_: int) -> list[str]:
    return warnings_of("auto", collective="ring")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of every scene, per rank."""
    return played_by_two((chosen, comings_and_goings, warned), tmp_path_factory.mktemp("ranks"))


def test_pairs_are_tried_alike_on_all_ranks_and_choices_that_are_made_again_give_the_same_bits(
    played: list[dict[str, Any]],
) -> None:
    first, second = (rank["chosen"] for rank in played)
    assert first["ways"] == second["ways"]
    assert len(first["ways"]) > 1
    for rank in (first, second):
        assert torch.equal(rank["weights"], first["weights"])
        assert torch.equal(rank["again"], first["weights"])


def test_a_pause_between_two_steps_is_no_part_of_what_a_step_took(played: list[dict[str, Any]]) -> None:
    for rank in played:
        assert 0 < rank["chosen"]["told_s"][20] < PAUSE_S


def test_closed_hooks_hold_nothing(played: list[dict[str, Any]]) -> None:
    assert not any(grows(rank["comings_and_goings"]) for rank in played)


def test_it_warns_of_nothing(played: list[dict[str, Any]]) -> None:
    assert [rank["warned"] for rank in played] == [[], []]
