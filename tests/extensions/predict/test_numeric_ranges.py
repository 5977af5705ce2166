"""Every numeric option of `bench calibrate` and `bench predict` has a lower and an upper limit."""

from __future__ import annotations

import pytest

from bench.core.config.configuration import Configuration
from bench.extensions.predict.options import CalibrateConfig, PredictConfig
from tests.unit.core.test_numeric_ranges import assert_among_options, assert_two_finite_ends, numbers_of

COMMANDS: dict[type[Configuration], str] = {CalibrateConfig: "calibrate", PredictConfig: "predict"}
DECLARED = numbers_of(COMMANDS)


@pytest.mark.parametrize(("cls", "name"), DECLARED, ids=[f"{cls.__name__}-{name}" for cls, name in DECLARED])
def test_it_has_two_finite_ends_and_takes_nothing_beyond(cls: type, name: str) -> None:
    assert_two_finite_ends(cls, name)


def test_every_declared_option_is_among_those_of_the_commands() -> None:
    assert_among_options(COMMANDS)
