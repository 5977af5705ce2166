"""Step times that ranks measure."""

import pytest

from bench.core.config.run import RunConfig
from bench.extensions.decide.step_times import DensityLevel, measure_step_times
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.resolve import resolve


def test_steps_are_timed_at_each_density_of_the_training() -> None:
    config = resolve(RunConfig(model="linear", compressor="topk:ratio=0.01", epochs=6, threads=1))
    dense = resolve(RunConfig(model="linear", compressor="none", epochs=6, threads=1))
    last_epoch = 5 * (1347 // 2 // config.batch_size)
    levels = {"topk": [DensityLevel(nbytes=0.0, step=0), DensityLevel(nbytes=0.0, step=last_epoch)]}
    blocks: list[int] = []
    with ForkServer(TRAIN) as server:
        times = measure_step_times(
            {"topk": config, "none": dense},
            levels | {"none": [DensityLevel(nbytes=0.0, step=0)]},
            server,
            max_s=0.0,
            on_block=blocks.append,
        )
    assert blocks == [1]
    first, last = times["topk"].nbytes
    # 25 % of the elements in the first epoch, 1 % in the last; places of many elements take fewer bits each
    assert 10 * last < first < 25 * last
    assert times["none"].nbytes == [30730 * 4.0]
    assert all(seconds > 0.0 for each in times.values() for block in each.seconds for seconds in block)


def test_timed_steps_contain_as_many_exchanges_as_the_training() -> None:
    strategy = "local:steps=40,delay=3"  # more steps than a block has otherwise
    config = resolve(RunConfig(model="linear", strategy=strategy, epochs=6, threads=1))
    with ForkServer(TRAIN) as server:
        times = measure_step_times(
            {"local": config}, {"local": [DensityLevel(nbytes=0.0, step=0)]}, server, max_s=0.0, on_block=lambda _: None
        )
    assert times["local"].nbytes == [pytest.approx(30730 * 4 / 40)]
