"""Load: when other programs matter, and what the first steps of a training take without them."""

import dataclasses
from pathlib import Path

import pytest

from bench.deciding.load import busy, is_busy, mean_share, set_aside
from bench.deciding.trajectory import Trajectory, without_load
from tests.unit.deciding.test_decision import trajectory


def test_a_busy_machine_is_told_by_the_mean_share() -> None:
    assert busy([None, 0.02, 0.1, 0.15], "x") == busy([None], "x") == []
    assert busy([0.5, 0.3, None], "steps were timed") == ["other programs took 40% of the cores while steps were timed"]
    assert (mean_share([]), mean_share([None, 0.2, 0.4])) == (None, pytest.approx(0.3))
    assert [is_busy(share) for share in (None, 0.0, 0.1, 0.11)] == [False, False, False, True]


def started(start_s: float, share: float | None) -> Trajectory:
    found = dataclasses.replace(trajectory(10, 1), start_s=start_s)
    found.run.rows[0]["other_cpu_share"] = share
    return found


@pytest.mark.parametrize(
    ("measured", "counted"),
    [
        ([(0.1, 0.0), (0.3, None)], [0.1, 0.3]),
        ([(0.1, 0.0), (0.3, 0.05), (1.0, 0.5)], [0.1, 0.3, 0.2]),
        ([(0.9, 0.5), (0.3, 0.6)], [0.3, 0.3]),
        ([], []),
    ],
)
def test_the_extra_time_of_the_first_steps_is_that_of_an_idle_machine(
    measured: list[tuple[float, float | None]], counted: list[float]
) -> None:
    found = without_load([started(*each) for each in measured])
    assert [each.start_s for each in found] == pytest.approx(counted)


def test_what_is_set_aside_twice_is_kept_twice(tmp_path: Path) -> None:
    for text in "ab":
        (tmp_path / "times").mkdir()
        (tmp_path / "times" / "job").write_text(text)
        set_aside(tmp_path, ("times", "absent"))
    assert sorted(path.read_text() for path in tmp_path.rglob("job")) == ["a", "b"]
    assert not (tmp_path / "times").exists()
