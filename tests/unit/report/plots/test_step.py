"""The parts of a step, against numbers computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.report.plots import step
from tests.testing.fake_results import fake_run, results


def test_what_a_step_is_made_of_adds_up_to_it(tmp_path: Path) -> None:
    (configuration,) = results(tmp_path, fake_run([0.95], step_time_s=0.05)).configurations
    assert list(step.parts_of_step(configuration).values()) == pytest.approx([0.03, 0.01, 0.05 - 0.04, 0.002, 0.010])


def test_a_hidden_exchange_has_no_bar(tmp_path: Path) -> None:
    (configuration,) = results(tmp_path, fake_run([0.95], encode_s=None, exchange_s=None)).configurations
    assert list(step.parts_of_step(configuration)) == ["forward and backward", "exposed exchange", "optimizer and rest"]
