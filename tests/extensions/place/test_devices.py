"""A host and its devices as threads: the work of a step, and skipped steps, which change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bench.core.config.run import RunConfig
from bench.extensions.place.assignment import Plan
from bench.extensions.place.device import DeviceProcess, Stage
from bench.extensions.place.host import HostSum, HostTraining
from bench.extensions.place.topology import Topology
from bench.models.cnn import Linear
from bench.optimizers.torch_optimizers import Sgd
from bench.strategies.base import Batch
from collectives.allreduce import Ring
from collectives.base import Collective
from compressors.base import Compressor
from compressors.floats import NoCompression
from compressors.layer import Step, layers_of
from compressors.topk import TopK
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.exchange.reducer import reducer_for
from tests.extensions.place.devices import device_file
from tests.testing.configs import make_config
from tests.testing.memory_transport import MemoryTransport, run_threads

BATCH = 4
CPU = torch.device("cpu")


def make() -> nn.Module:
    torch.manual_seed(3)
    return Linear().build(10)


def train(
    config: RunConfig,
    plan: Plan,
    steps: Callable[[HostTraining], list[bool]],
    compressor: Compressor,
    merge: str,
) -> tuple[list[bool], nn.Module]:
    """Train, and return the results of `steps` and the model afterwards."""
    models = [make() for _ in range(3)]
    placed = [plan.assign(model, "asic")[1] for model in models]

    def work(transport: MemoryTransport) -> list[bool]:
        model, routes = models[transport.rank], placed[transport.rank]
        if transport.rank == 0:
            stages = {rank: Stage(route, 0, transport, CPU) for route in routes for rank in route.ranks}
            host = HostTraining(config, model, plan, stages, transport, None)
            outcomes = steps(host)
            host.synchronize()
            host._tell_all({"command": "stop"})
            return outcomes
        replica, index = transport.rank - 1, 0  # one device in each replica
        collective: Collective = HostSum(transport) if merge == "host" else Ring()
        channel = CompressedCommunicator(
            layers_of(model),
            reducer_for(compressor),
            collective,
            transport.view([ranks[index] for ranks in plan.ranks]),
        )
        stage = Stage(routes[replica], index, transport, CPU)
        device = DeviceProcess(config, stage, replica, channel, transport, Sgd(momentum=0.9))
        device.follow(lambda *_: None)
        return []

    outcomes, *_ = run_threads(work, 3)
    return outcomes, models[0]


@pytest.fixture
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return Plan.of(Topology.read(device_file(tmp_path_factory.mktemp("devices"), gpu=2)), "data")


def one_step(host: HostTraining, index: int, *, spoilt: bool = False) -> bool:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(2 * BATCH, 3, 32, 32, generator=generator)
    if spoilt:
        x[BATCH] = torch.nan  # only on the second replica
    y = torch.randint(0, 10, (2 * BATCH,), generator=generator)
    step = Step(index=index, epoch=0, rank=0, world_size=2, seed=1, warmup=False)
    return host.train_step(Batch(x=x, y=y, step=step, lr=0.1)).skipped


def expected_after(steps: list[int], label_smoothing: float = 0.0) -> nn.Module:
    """Return the model after one process trained on both mini-batches of these steps."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in steps:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(2 * BATCH, 3, 32, 32, generator=generator)
        y = torch.randint(0, 10, (2 * BATCH,), generator=generator)
        nn.functional.cross_entropy(model(x), y, label_smoothing=label_smoothing).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("trigger", ["async", "sync"])
@pytest.mark.parametrize("merge", ["devices", "host"])
def test_a_step_is_one_of_the_mean_gradient(plan: Plan, trigger: str, merge: str) -> None:
    config = make_config(batch_size=BATCH, trigger=trigger)
    skipped, model = train(
        config, plan, lambda host: [one_step(host, index) for index in range(3)], NoCompression(), merge
    )
    assert skipped == [False] * 3
    for ours, theirs in zip(model.parameters(), expected_after([0, 1, 2]).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_gradient_that_is_not_finite_on_one_device_leaves_the_step_out_on_all(plan: Plan) -> None:
    config = make_config(batch_size=BATCH)
    steps = [False, True, False]

    def spoilt_once(host: HostTraining) -> list[bool]:
        return [one_step(host, index, spoilt=spoilt) for index, spoilt in enumerate(steps)]

    skipped, model = train(config, plan, spoilt_once, NoCompression(), "devices")
    assert skipped == steps
    for ours, theirs in zip(model.parameters(), expected_after([0, 2]).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_loss_may_be_smoothed(plan: Plan) -> None:
    config = make_config(batch_size=BATCH, label_smoothing=0.3)
    _, model = train(config, plan, lambda host: [one_step(host, 0)], NoCompression(), "devices")
    for ours, theirs in zip(model.parameters(), expected_after([0], label_smoothing=0.3).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_residuals_are_dropped_with_the_step(plan: Plan) -> None:
    """With error feedback, a dropped step must not affect later messages."""
    config, compressor = make_config(batch_size=BATCH), TopK(ratio=0.1, min_numel=0)
    runs = [
        train(config, plan, lambda host: [one_step(host, i, spoilt=i == 2) for i in range(4)], compressor, "devices"),
        train(config, plan, lambda host: [one_step(host, i) for i in (0, 1, 3)], compressor, "devices"),
    ]
    for ours, theirs in zip(*(model.parameters() for _, model in runs), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_may_ask_to_stop_at_such_a_gradient(plan: Plan) -> None:
    config = dataclasses.replace(make_config(batch_size=BATCH), nonfinite="raise")
    with pytest.raises(RuntimeError, match="a gradient was not finite at step 0"):
        train(config, plan, lambda host: [one_step(host, 0, spoilt=True)], NoCompression(), "devices")
