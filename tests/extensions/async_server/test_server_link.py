"""The link between workers and the parameter server, over the in-memory transport: its messages and their counts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bench.extensions.async_server.server import (
    SERVER,
    WORKER,
    ClockEnd,
    ControlMessage,
    ParameterServer,
    RemoteServer,
    Request,
    ServerReply,
    _buffers,
    serve,
)
from collectives.payloads import Dense
from collectives.payloads.base import unpack
from collectives.payloads.fields import PayloadError
from tests.extensions.async_server.parameters import Recorded
from tests.testing.limits import LIMIT_S
from tests.testing.memory_transport import MemoryTransport, MemoryWires
from tests.testing.payloads import MAKERS, make

CONTROL_BYTES = 24


class Star:
    """A server in this process, and workers at the other ends of the wires."""

    def __init__(self, server: ParameterServer, numels: Sequence[int]) -> None:
        self.failures: list[BaseException] = []
        self.ends: list[MemoryTransport] = []  # the server's ends
        self.workers: list[RemoteServer] = []
        self.worker_ends: list[MemoryTransport] = []
        self.threads: list[threading.Thread] = []
        for rank in range(server.world_size):
            wires = MemoryWires(2)
            self.ends.append(wires.transport(SERVER))
            self.worker_ends.append(wires.transport(WORKER))
            self.workers.append(RemoteServer(self.worker_ends[-1], numels))
            arguments = (self.ends[-1], server.join(rank), numels)
            self.threads.append(threading.Thread(target=self._serve, args=arguments, daemon=True))
        for thread in self.threads:
            thread.start()

    def _serve(self, *arguments: Any) -> None:
        try:
            serve(*arguments)
        except (PayloadError, RuntimeError) as error:
            self.failures.append(error)


@contextmanager
def star(server: ParameterServer, numels: Sequence[int]) -> Iterator[Star]:
    """Yield a star; afterwards all workers leave, and the server's threads end."""
    made = Star(server, numels)
    yield made
    for worker in made.workers:
        worker.disconnect()
    for thread in made.threads:
        thread.join()
    assert made.failures == []


def at_once(*work: Callable[[], ServerReply]) -> list[ServerReply]:
    answers: dict[int, ServerReply] = {}
    threads = [
        threading.Thread(target=lambda i=index, f=function: answers.update({i: f()}), daemon=True)
        for index, function in enumerate(work)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[index] for index in range(len(work))]


def clock_end(index: int = 0, *, dropped: bool = False) -> ClockEnd:
    return ClockEnd(index=index, epoch=0, lr=0.1, dropped=dropped)


@pytest.mark.parametrize("kind", MAKERS)
def test_every_kind_of_payload_arrives_and_is_counted(kind: str) -> None:
    examples = [make(kind, 1024, torch.float32, seed) for seed in range(2)]
    numels = [example.payload.numel for example in examples]
    parameters = Recorded(numels)
    with star(ParameterServer(parameters, 1, LIMIT_S, staleness=None), numels) as links:
        for layer_id in (1, 0):  # the order of the backward pass
            links.workers[0].push(layer_id, examples[layer_id].payload)
        answer = links.workers[0].end_clock(clock_end())
        sent, answered = links.worker_ends[0].traffic, links.ends[0].traffic
        assert (sent["gradient"].nbytes, sent["gradient"].messages) == (sum(e.payload.nbytes for e in examples), 2)
        assert (sent["control"].nbytes, answered["control"].nbytes) == (CONTROL_BYTES, CONTROL_BYTES)
        assert (answered["gradient"].nbytes, answered["gradient"].messages) == (sum(16 + 4 * n for n in numels), 2)
        assert answered["replicas"].nbytes == 0
    for example, values, packed in zip(examples, parameters.values, answer.parameters, strict=True):
        torch.testing.assert_close(values, example.dense)
        assert torch.equal(unpack(packed).to_dense(), values)


def test_what_settling_sends_is_counted_apart() -> None:
    with star(ParameterServer(Recorded([5, 0]), 1, LIMIT_S, staleness=None), [5, 0]) as links:
        answer = links.workers[0].synchronize()
        traffic = links.ends[0].traffic
        assert traffic["replicas"].nbytes == (16 + 20) + 16
        assert traffic["gradient"].nbytes == 0
    assert (answer.version, answer.num_steps, answer.staleness) == (0, 0, None)


def test_a_worker_tells_where_it_is_and_what_it_drops() -> None:
    parameters = Recorded([2])
    with star(ParameterServer(parameters, 2, LIMIT_S, staleness=None), [2]) as links:
        first, second = links.workers
        first.push(0, Dense(torch.ones(2)))
        assert first.end_clock(clock_end(7)).staleness == 0
        first.push(0, Dense(torch.ones(2)))
        assert first.end_clock(clock_end(8, dropped=True)).staleness is None
        second.push(0, Dense(torch.ones(2)))
        answer = second.end_clock(clock_end(9))
    assert (answer.version, answer.num_steps, answer.staleness) == (2, 1, 1)
    assert parameters.applied == [([(0, 7)], 1), ([(1, 9)], 1)]


def test_a_clock_may_have_no_payload_at_all() -> None:
    parameters = Recorded([2, 3])
    with star(ParameterServer(parameters, 1, LIMIT_S, staleness=None), [2, 3]) as links:
        for index in range(3):
            assert links.workers[0].end_clock(clock_end(index)).num_steps == index + 1


@pytest.mark.parametrize("num_layers", [0, 1, 7, 8, 30])
def test_any_number_of_layers(num_layers: int) -> None:
    parameters = Recorded(range(num_layers))
    with star(ParameterServer(parameters, 2, LIMIT_S, staleness=1), parameters.numels) as links:
        for index in range(3):
            for worker in links.workers:
                for layer_id in range(num_layers):
                    worker.push(layer_id, Dense(torch.full((layer_id,), 2.0)))
            at_once(*(lambda w=worker, i=index: w.end_clock(clock_end(i)) for worker in links.workers))
        answers = at_once(*(worker.synchronize for worker in links.workers))
    assert [unpack(packed).to_dense().tolist() for packed in answers[0].parameters] == [
        [6.0] * n for n in range(num_layers)
    ]


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_bound_holds_over_wires(staleness: int) -> None:
    numels = [4, 2]
    parameters = Recorded(numels)
    seen: list[tuple[int, int]] = []

    def work(worker: RemoteServer, rank: int) -> ServerReply:
        dice = random.Random(rank)
        for index in range(15):
            for layer_id in (1, 0):
                time.sleep(dice.random() * 0.002)
                worker.push(layer_id, Dense(torch.full((numels[layer_id],), 3.0)))
            seen.append((index + 1, worker.end_clock(clock_end(index)).version))
        return worker.synchronize()

    with star(ParameterServer(parameters, 3, LIMIT_S, staleness=staleness), numels) as links:
        answers = at_once(*(lambda w=w, r=r: work(w, r) for r, w in enumerate(links.workers)))
    assert len(seen) == 45
    assert all(started - staleness <= version <= started for started, version in seen)
    assert {answer.version for answer in answers} == {15}
    assert parameters.values[0].tolist() == [45.0] * 4


def hostile_messages() -> list[tuple[str, torch.Tensor]]:
    dice = random.Random(1)
    too_far, too_long = Dense(torch.ones(3)), Dense(torch.ones(4))
    too_far.tensor_id = 1
    unknown = ControlMessage(Request.APPLY).pack()
    unknown[2] = 9
    return [
        ("noise", torch.tensor([dice.randrange(256) for _ in range(64)], dtype=torch.uint8)),
        ("a layer that is not there", too_far.pack()),
        ("too many elements", too_long.pack()),
        ("a control that means nothing", unknown),
    ]


@pytest.mark.parametrize(("name", "message"), hostile_messages(), ids=[name for name, _ in hostile_messages()])
def test_what_no_worker_sends_is_refused(name: str, message: torch.Tensor) -> None:
    wires = MemoryWires(2)
    sender = wires.transport(WORKER)
    sender.send(message.contiguous(), SERVER)
    parameters = Recorded([3])
    with pytest.raises(PayloadError):
        serve(wires.transport(SERVER), ParameterServer(parameters, 1, LIMIT_S, staleness=None).join(0), [3])
    assert parameters.applied == []


def test_a_payload_longer_than_the_server_has_room_for_never_leaves() -> None:
    wires = MemoryWires(2)
    worker = RemoteServer(wires.transport(WORKER), [3])
    with pytest.raises(PayloadError, match="longer than"):
        worker.push(0, Dense(torch.ones(100_000)))


def test_more_layers_than_a_header_can_number_are_refused() -> None:
    with pytest.raises(PayloadError, match="at most 65536 layers"):
        RemoteServer(MemoryWires(2).transport(WORKER), [1] * 65537)


@pytest.mark.parametrize(("numel", "num_layers", "expected"), [(1000, 0, 1), (1000, 60, 61), (2_000_000, 60, 8)])
def test_all_messages_of_a_clock_find_a_buffer_unless_layers_are_large(
    numel: int, num_layers: int, expected: int
) -> None:
    assert _buffers([numel] * num_layers)[1] == expected
