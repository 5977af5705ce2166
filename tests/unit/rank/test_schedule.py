"""The learning rate at its end points, and linear scaling."""

from __future__ import annotations

import dataclasses

import pytest

from bench.rank.trainer import learning_rate
from tests.testing.configs import make_config


def test_constant() -> None:
    config = make_config(schedule="constant", lr=0.1)
    assert {learning_rate(config, step, 100, 10) for step in range(100)} == {0.1}


def test_cosine_falls_from_the_peak_towards_zero() -> None:
    config = make_config(schedule="cosine", lr=0.1)
    rates = [learning_rate(config, step, 100, 10) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[50] == pytest.approx(0.05)
    assert rates == sorted(rates, reverse=True)
    assert learning_rate(config, 100, 100, 10) == pytest.approx(0.0, abs=1e-12)


def test_step_divides_by_ten_at_half_and_three_quarters() -> None:
    config = make_config(schedule="step", lr=1.0)
    assert [learning_rate(config, step, 100, 10) for step in (0, 49, 50, 74, 75, 99)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )


def test_warmup_rises_linearly_and_reaches_the_peak() -> None:
    config = make_config(schedule="constant", lr=1.0, warmup_epochs=2.0)
    rates = [learning_rate(config, step, 100, 10) for step in range(25)]
    assert rates[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert rates[20:] == [1.0] * 5


def test_linear_scaling_is_linear_in_the_number_of_ranks() -> None:
    config = make_config(schedule="constant", lr=0.1, lr_scaling="linear")
    based = dataclasses.replace(config, lr_scaling="linear:base=8", replicas=4)
    assert learning_rate(based, 0, 10, 10) == pytest.approx(0.05)
    rates = [learning_rate(dataclasses.replace(config, replicas=n), 0, 100, 10) for n in (1, 2, 4)]
    assert rates == pytest.approx([0.1, 0.2, 0.4])


def test_gradual_scaling_rises_from_the_rate_of_one_rank() -> None:
    """Goyal et al. 2017, section 2.2: the rate grows by a constant amount per step, from lr to lr x ranks."""
    config = make_config(
        schedule="constant", lr=0.1, lr_scaling="linear:gradual=true", warmup_epochs=0.4, replicas=8, world_size=8
    )
    rates = [learning_rate(config, step, 100, 10) for step in range(6)]
    assert rates == pytest.approx([0.1, 0.275, 0.45, 0.625, 0.8, 0.8])
    based = dataclasses.replace(config, lr_scaling="linear:base=4,gradual=true", schedule="cosine")
    rates = [learning_rate(based, step, 100, 10) for step in (0, 1, 2, 4, 52, 100)]
    assert rates == pytest.approx([0.1, 0.125, 0.15, 0.2, 0.1, 0.0])


def test_gradual_scaling_of_one_rank_is_no_warmup() -> None:
    config = make_config(schedule="constant", lr_scaling="linear:gradual=true", warmup_epochs=2.0, replicas=1)
    assert {learning_rate(config, step, 100, 10) for step in range(30)} == {0.1}
