"""A deliberately slow rank: its options, and the time that it sleeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.core.config.run import RunConfig
from bench.core.config.syntax import Straggler
from bench.core.errors import UsageError
from bench.launch.plan import plan
from bench.rank import worker


@pytest.mark.parametrize("text", ["rank=1,slowdown=3", " rank = 1 , slowdown = 3.0 ", "rank=1,slowdown=3e0"])
def test_reading(text: str) -> None:
    assert str(Straggler.parse(text)) == "rank=1,slowdown=3"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "rank=1",
        "slowdown=3,rank=1",
        "rank=-1,slowdown=3",
        "rank=1,slowdown=0.5",
        "rank=1,slowdown=e.e",
        "rank=1,slowdown=1e999",
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="write rank=1,slowdown=3") as raised:
        Straggler.parse(text)
    assert "\n" not in str(raised.value)


def test_the_plan_keeps_it_as_part_of_the_experiment() -> None:
    config = plan(RunConfig(straggler="rank=1, slowdown=3.0"))
    assert config.straggler == "rank=1,slowdown=3"
    assert config.columns()["straggler"] == "rank=1,slowdown=3"
    assert config.digest != plan(RunConfig()).digest


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="names none of the 2 ranks"):
        plan(RunConfig(straggler="rank=2,slowdown=3"))


def test_a_step_takes_as_many_times_as_long_before_its_last_gradient_is_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 12.5, 20.0, 21.0, 30.0])
    events: list[object] = []
    monkeypatch.setattr(worker, "device_time", lambda _device: next(clock))
    monkeypatch.setattr(worker.time, "sleep", events.append)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    worker.slow_down(model, 3.0)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    for _ in range(2):
        events.clear()
        model(torch.ones(4, 3)).sum().backward()
        slept = [event for event in events if isinstance(event, float)]
        assert len(slept) == 1
        assert events.index(slept[0]) < len(events) - 1
    assert slept == [2.0 * 1.0]
    events.clear()
    model(torch.ones(4, 3))  # an evaluation: no backward, no sleep
    assert events == []
