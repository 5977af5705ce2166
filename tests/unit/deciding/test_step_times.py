"""Step times that ranks measure."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bench.core.config.run import RunConfig
from bench.core.run_folder import RunFolder
from bench.deciding.step_times import measure_step_times
from bench.deciding.step_times_worker import TimedMethod
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.plan import plan
from bench.strategies.local import LocalTraining
from gradwire.local import exchange
from tests.testing.configs import COMPONENTS, make_config


def test_steps_are_timed_at_each_density_of_the_training() -> None:
    config = plan(RunConfig(model="linear", compressor="topk:ratio=0.01", epochs=6, threads=1))
    dense = plan(RunConfig(model="linear", compressor="none", epochs=6, threads=1))
    dense_at_first = plan(RunConfig(model="linear", compressor="powersgd:dense_steps=40", epochs=6, threads=1))
    alternate = plan(RunConfig(model="linear", compressor="powersgd:alternate=true", epochs=6, threads=1))
    last_epoch = 5 * (1347 // 2 // config.batch_size)
    levels = [0, last_epoch]
    blocks: list[int] = []
    with ForkServer(TRAIN) as server:
        times = measure_step_times(
            {"topk": config, "none": dense, "dense at first": dense_at_first, "alternate": alternate},
            {"topk": levels, "none": levels[:1], "dense at first": levels, "alternate": levels[:1]},
            server,
            max_s=0.0,
            on_block=blocks.append,
        )
    assert blocks == [1]
    first, last = times["topk"].nbytes
    # 25 % of the elements in the first epoch, 1 % in the last; places of many elements take fewer bits each
    assert 10 * last < first < 25 * last
    assert times["none"].nbytes == [30730 * 4.0]
    bias, factors = 10, 2 * (10 + 3072)
    assert times["dense at first"].nbytes == [30730 * 4.0, 4.0 * (bias + factors)]
    assert times["alternate"].nbytes == [4.0 * (bias + factors / 2)]
    assert all(seconds > 0.0 for each in times.values() for (block,) in each.seconds for seconds in block)


def test_timed_steps_contain_as_many_exchanges_as_the_training() -> None:
    strategy = "local:steps=40,delay=3"  # more steps than a block has otherwise
    config = plan(RunConfig(model="linear", strategy=strategy, epochs=6, threads=1))
    with ForkServer(TRAIN) as server:
        times = measure_step_times({"local": config}, {"local": [0]}, server, max_s=0.0, on_block=lambda _: None)
    assert times["local"].nbytes == [pytest.approx(30730 * 4 / 40)]


class Clock:
    """A clock by which every training step takes 1 s and every exchange 5 s, in the background or not."""

    now = 0.0
    exchange_s = 5.0

    def start(self, exchange: Callable[..., Any], *args: Any) -> "Clock.Result":
        return self.Result(self, exchange(*args))

    class Result:
        def __init__(self, clock: "Clock", value: Any) -> None:
            self._clock, self._value, self._ends_at = clock, value, clock.now + clock.exchange_s

        def result(self) -> Any:
            """Wait until the exchange has ended."""
            self._clock.now = max(self._clock.now, self._ends_at)
            return self._value


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found, train_step = Clock(), LocalTraining.train_step

    class Background:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.submit = found.start

        def shutdown(self) -> None:
            pass

    def step(self: LocalTraining, *args: Any) -> Any:
        found.now += 1.0
        return train_step(self, *args)

    monkeypatch.setattr(exchange, "ThreadPoolExecutor", Background)
    monkeypatch.setattr(LocalTraining, "train_step", step)
    monkeypatch.setattr("bench.rank.record.device_time", lambda _: found.now)
    monkeypatch.setattr("bench.rank.record.ProgressFile", mock.Mock())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield found
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("delay", "fragments", "eval_every"), [(1, 1, 1.0), (2, 2, 1.0), (3, 1, 1.0), (2, 1, 0.001), (3, 2, 0.001)]
)
def test_every_block_takes_as_long_as_an_interval_of_a_long_run(
    delay: int, fragments: int, eval_every: float, clock: Clock, tmp_path: Path
) -> None:
    steps = 4 * fragments
    strategy = f"local:steps={steps},delay={delay},fragments={fragments}"
    components = COMPONENTS | {"strategy": strategy, "model": "small_cnn:width=2,hidden=4"}
    config = make_config(world_size=1, replicas=1, ranks_per_host=1, eval_every=eval_every, filled=components)
    method = TimedMethod(config, RunFolder(tmp_path), [0], torch.device("cpu"))
    interval_s = steps + fragments * (clock.exchange_s - delay)  # the wait that the steps after the start do not hide
    blocks = [method.time_steps(0, steps) for _ in range(3)]
    assert [seconds * steps for seconds, _ in blocks] == pytest.approx([interval_s] * 3)
    assert len({nbytes for _, nbytes in blocks}) == 1
    method.strategy.close()
