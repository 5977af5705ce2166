"""Measure the CPU time of messages: the time that ranks take, and the time to carry bytes between virtual hosts.

The kernel's accounting does not show the CPU time that it takes to carry a byte between virtual hosts, because a kernel
that samples each core's work only at timer ticks misses the work on timers and frames between two ticks. So this
time is computed from how much more slowly the ranks compute while messages are carried, as in training. Each rank on a
virtual host runs this module: `python -m bench.extensions.predict.message_costs FOLDER`.
"""

import contextlib
import dataclasses
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from bench.core import environment
from bench.core.config.run import RanksConfig
from bench.core.counters import ForwarderUse, forwarder_cpu_s
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, append_json_line
from bench.extensions.predict.calibration import MessageCosts
from bench.rank.process import end_process, process_group, rank_main, set_up_device
from collectives.transport.base import Transport, wait_all
from collectives.transport.sockets import open_transport

SHORT_BYTES, LONG_BYTES = 1_000, 1_000_000
SHORT_MESSAGES, LONG_MESSAGES = 40, 5
SHORT_ROUNDS, LONG_ROUNDS = 25, 7
MESSAGE_BYTES = 300_000
# Number of exchanges in which the time to carry a byte is measured.
EXCHANGES = 40
# The mean leaves out this share of the results at the lower end, and the same share at the upper end.
STRAY_SHARE = 0.2
REST_S = 0.1
ROWS = 128


def message_costs(transport: Transport, long_messages: int) -> MessageCosts:
    """Measure the costs of messages between ranks 0 and 1; both must call this function.

    Args:
        transport: connects ranks 0 and 1, and possibly others.
        long_messages: number of messages of 1 MB in each repetition.

    Returns:
        The CPU time of a rank per message and byte, and the time until a rank that waits for a message continues; the
        field `carry_byte_s` is 0.
    """
    short = [_round_trips(transport, SHORT_BYTES, SHORT_MESSAGES) for _ in range(SHORT_ROUNDS)]
    long = [_round_trips(transport, LONG_BYTES, long_messages) for _ in range(LONG_ROUNDS)]
    short_s, long_s = (statistics.median(cpu_s for _, cpu_s in rounds) / 2 for rounds in (short, long))
    per_byte_s = max(0.0, (long_s - short_s) / (LONG_BYTES - SHORT_BYTES))
    message_s = max(0.0, short_s - per_byte_s * SHORT_BYTES)
    waited_s = statistics.median(wall_s - cpu_s for wall_s, cpu_s in short)
    return MessageCosts(message_s=message_s, per_byte_s=per_byte_s, wake_s=max(0.0, waited_s))


def _round_trips(transport: Transport, nbytes: int, messages: int) -> tuple[float, float]:
    """Exchange messages with the other rank; return wall-clock and CPU seconds of this process per exchange."""
    other = 1 - transport.rank
    mine, theirs = torch.zeros(2, nbytes, dtype=torch.uint8)
    started, cpu = time.perf_counter(), time.process_time()
    for _ in range(messages):
        wait_all(transport.post([(mine, other)], [(theirs, other)]))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    return wall_s / messages, cpu_s / messages


# Calls a function; returns (matrix products per second that the thread computed meanwhile, seconds of the call).
PerSecond = Callable[[Callable[[], object]], tuple[float, float]]


@contextlib.contextmanager
def computing() -> Iterator[PerSecond]:
    """Multiply small matrices in a thread until the context ends; yield a function that measures the thread's speed."""
    count, goes_on = 0, True

    def compute() -> None:
        nonlocal count
        matrix, product = torch.ones(ROWS, ROWS), torch.empty(ROWS, ROWS)
        while goes_on:
            torch.mm(matrix, matrix, out=product)
            count += 1

    def per_s(work: Callable[[], object]) -> tuple[float, float]:
        before, started = count, time.perf_counter()
        work()
        seconds = time.perf_counter() - started
        return (count - before) / seconds, seconds

    thread = threading.Thread(target=compute, name="computing")
    thread.start()
    try:
        yield per_s
    finally:
        goes_on = False
        thread.join()


def carry_byte_s(transport: Transport, costs: MessageCosts) -> float:
    """Return the CPU seconds that the kernel takes to carry a byte between virtual hosts.

    Every rank must call this function.

    Each exchange of messages is compared with an idle period just before, because the speed of the cores varies over
    time. The result is a mean, not a median, because the same frames take several times as long if processes run on
    other cores.

    Args:
        transport: connects the ranks, each of which has its own virtual host.
        costs: the CPU time of the ranks themselves for messages, which is subtracted.
    """
    n, cores, found = transport.world_size, environment.usable_cores(), []
    own_s = 2 * (costs.message_s + costs.per_byte_s * MESSAGE_BYTES)
    with computing() as per_s:
        for _ in range(EXCHANGES):
            transport.barrier()
            at_rest, _ = per_s(lambda: time.sleep(REST_S))
            transport.barrier()
            beside, seconds = per_s(lambda: _exchange(transport))
            at_rest, beside, seconds = transport.all_reduce_scalars([at_rest, beside, seconds], "sum")
            taken_s = cores * seconds / n * (1 - beside / at_rest)
            found.append((taken_s / (n * (n - 1)) - own_s) / MESSAGE_BYTES)
    stray = int(STRAY_SHARE * len(found))
    return max(0.0, statistics.fmean(sorted(found)[stray : len(found) - stray]))


def forwarded_byte_s(transport: Transport) -> float:
    """Return the CPU seconds per byte of the one thread that forwards all messages; every rank must call this function.

    Many frames are under way at once, as in training, because the thread's time per frame grows with the number of
    frames that the thread holds.
    """
    n, use = transport.world_size, ForwarderUse()
    for _ in range(EXCHANGES):
        transport.barrier()
        use.start()
        _exchange(transport)
        transport.barrier()
        use.stop()
    (cpu_s,) = transport.all_reduce_scalars([use.cpu_s], "sum")
    return cpu_s / n / (EXCHANGES * n * (n - 1) * MESSAGE_BYTES)


def _exchange(transport: Transport) -> None:
    """Send one message to every other rank, and receive one message from each."""
    others = [rank for rank in range(transport.world_size) if rank != transport.rank]
    mine, *theirs = torch.zeros(1 + len(others), MESSAGE_BYTES, dtype=torch.uint8)
    sends, receives = [(mine, other) for other in others], list(zip(theirs, others, strict=True))
    wait_all(transport.post(sends, receives))


def run(config: RanksConfig, folder: RunFolder) -> None:
    """Measure the costs of messages between virtual hosts, and write them to `progress.jsonl` in the folder."""
    with process_group(set_up_device("cpu", 1), config.timeout_s):
        transport = open_transport(timeout_s=config.timeout_s)
        costs = message_costs(transport, LONG_MESSAGES) if dist.get_rank() < 2 else MessageCosts()
        dist.barrier()
        carried_s = forwarded_byte_s(transport) if forwarder_cpu_s() is not None else carry_byte_s(transport, costs)
        waited_s = max(0.0, costs.wake_s - (config.latency_s or 0.0))
        costs = dataclasses.replace(costs, wake_s=waited_s, carry_byte_s=carried_s)
        transport.close()
        if dist.get_rank() == 0:
            append_json_line(folder.progress, {"messages": dataclasses.asdict(costs)})


main = rank_main(RanksConfig, run, (BenchError,))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
