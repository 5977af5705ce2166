"""Tasks on devices and links: bounds of the makespan, and longer tasks never shorten it (T14)."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from bench.extensions.place.step import DeviceJob, end_times


def bounds(tasks: list[DeviceJob]) -> tuple[float, float, float]:
    """Return the seconds of the longest chain of tasks, of the step, and of all tasks one after the other."""
    chain = end_times([dataclasses.replace(task, uses=()) for task in tasks])
    return max(chain.values()), max(end_times(tasks).values()), sum(task.seconds for task in tasks)


@st.composite
def task_lists(draw: st.DrawFn) -> list[DeviceJob]:
    tasks: list[DeviceJob] = []
    for index in range(draw(st.integers(1, 25))):
        names = [task.name for task in tasks]
        tasks.append(
            DeviceJob(
                name=str(index),
                seconds=draw(st.integers(0, 100)),
                uses=tuple(draw(st.sets(st.sampled_from("abcd"), max_size=2))),
                after=tuple(draw(st.sets(st.sampled_from(names), max_size=3))) if names else (),
            )
        )
    return tasks


@given(tasks=task_lists())
def test_between_the_critical_path_and_the_serial_sum(tasks: list[DeviceJob]) -> None:
    assert bounds(tasks) == tuple(sorted(bounds(tasks)))


@given(tasks=task_lists(), more=st.integers(1, 50), data=st.data())
def test_a_longer_task_never_makes_the_whole_shorter(tasks: list[DeviceJob], more: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(tasks) - 1))
    longer = list(tasks)
    longer[index] = dataclasses.replace(tasks[index], seconds=tasks[index].seconds + more)
    assert max(end_times(longer).values()) >= max(end_times(tasks).values())


@given(tasks=task_lists())
def test_nothing_is_used_twice_at_once_and_nothing_starts_too_early(tasks: list[DeviceJob]) -> None:
    ends = end_times(tasks)
    for number, task in enumerate(tasks):
        start = ends[task.name] - task.seconds
        assert all(start >= ends[name] for name in task.after)
        for earlier in tasks[:number]:
            assert start >= ends[earlier.name] or not set(task.uses) & set(earlier.uses)


def test_two_devices_work_at_once_and_share_a_link() -> None:
    tasks = [
        DeviceJob(name="first", seconds=3, uses=("gpu0",)),
        DeviceJob(name="second", seconds=4, uses=("fpga0",)),
        DeviceJob(name="first sent", seconds=2, uses=("link",), after=("first",)),
        DeviceJob(name="second sent", seconds=2, uses=("link",), after=("second",)),
    ]
    assert end_times(tasks) == {"first": 3, "second": 4, "first sent": 5, "second sent": 7}
    assert bounds(tasks) == (6, 7, 11)
