"""Time and check sums on the ranks of `bench collectives`; each rank runs this module with the job folder's path.

Each rank reads the folder's `config.json`. A pair is a collective with a compressor. The pairs take turns; in each
turn, one pair makes a round of sums. Rank 0 appends a line to `progress.jsonl` after every round of a pair, and the
rows of all pairs when a tensor size is finished.
"""

import contextlib
import copy
import dataclasses
import datetime
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

import torch
import torch.distributed as dist

from bench.core import spec
from bench.core.counters import ForwarderUse, interface_bytes
from bench.core.environment import origin_columns
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, append_json_line
from bench.core.units import format_bytes, parse_sizes
from bench.extensions.microbenchmarks.options import BYTES_PER_ELEMENT, CollectivesConfig, interleave
from bench.extensions.microbenchmarks.serial import error_bound, serial_sum
from bench.rank.overlap import mean_overlap, support
from bench.rank.process import (
    device_time,
    end_process,
    link_columns,
    link_rates,
    process_group,
    rank_main,
    set_up_device,
)
from collectives.base import Collective
from collectives.direct import on_links
from collectives.options import OptionError
from collectives.payloads import Dense, Payload, PayloadError, unpack
from collectives.transport.base import Ledger, Traffic, Transport, TransportError
from collectives.transport.process_group import gather_bytes
from collectives.transport.sockets import open_transport
from compressors.base import PerLayer
from compressors.layer import Layer, Step
from gradwire.exchange.reducer import PerLayerReducer
from gradwire.exchange.report import Bucket

TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "int32": torch.int32,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticPayloads:
    """Hold the payloads (compressed or dense tensors) that the ranks sum.

    Attributes:
        own: this rank's payload; pass only copies of it to a collective, because a collective may overwrite them.
        of_all: the payloads of all ranks in rank order, each packed to bytes and unpacked again.
        overlap: share of entries that two ranks both send, as the mean over pairs of ranks: 2 |A and B| / (|A| + |B|),
            where A and B are the sets of positions that the two ranks send; None if a rank sends every element.
    """

    own: Payload
    of_all: list[Payload]
    overlap: float | None


def make_synthetic_payloads(
    config: CollectivesConfig, compressor: str, count: int, transport: Transport
) -> SyntheticPayloads:
    """Return the payloads of all ranks, each of a synthetic tensor; every rank must call this function.

    Args:
        config: options of the command.
        compressor: the compressor as text, such as `topk:ratio=0.01`; with `none`, the payload is the tensor in its own
            type.
        count: number of elements of the tensor.
        transport: connects the ranks; used by compressors whose ranks communicate before they encode.
    """
    tensor = synthetic_tensor(config, count, transport.rank).to(transport.device)
    own = payload_of(tensor, compressor, config, transport)
    packed = gather_bytes(own.pack().cpu().numpy().tobytes())
    of_all = [unpack(torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(transport.device)) for raw in packed]
    return SyntheticPayloads(own=own, of_all=of_all, overlap=support_overlap(of_all))


def payload_of(tensor: torch.Tensor, compressor: str, config: CollectivesConfig, transport: Transport) -> Payload:
    """Return the payload that a compressor makes of a tensor, as if it was the gradient of a model with one layer.

    If the compressor sends more during a warm-up, the payload is as after the warm-up. Every rank must call this
    function.

    Args:
        tensor: tensor [numel] of a floating-point type; with compressor `none`, of any type.
        compressor: the compressor as text, such as `topk:ratio=0.01`; `none` keeps the tensor's own type.
        config: options of the command.
        transport: connects the ranks; used by compressors whose ranks communicate before they encode.
    """
    component = cast(PerLayer, spec.build("compressors", compressor))
    if component.component_name == "none":
        return Dense(tensor.clone())
    count = tensor.numel()
    layer = Layer(id=0, name="tensor", shape=(1, count), kind="linear", numel=count, position=0.5)
    step = Step(index=0, epoch=0, rank=transport.rank, world_size=config.world_size, seed=config.seed, warmup=False)
    bucket = Bucket(layers=[layer], gradients=[tensor.clone()], step=step)
    payload = PerLayerReducer(component).message(bucket, transport)
    assert payload is not None  # sizes without elements are refused earlier
    return payload


def support_overlap(payloads: Sequence[Payload]) -> float | None:
    """Return the share of positions that two ranks both send, from 0 to 1, as the mean over pairs of ranks.

    The share is 2 |A and B| / (|A| + |B|), where A and B are the sets of gradient positions that the two ranks send.
    The result is None if a payload sends every element, or if no payload sends any element.

    Args:
        payloads: one payload per rank, all of the same layers.
    """
    if any(payload.num_entries == payload.numel for payload in payloads):
        return None
    return mean_overlap([support(payload) for payload in payloads])


def synthetic_tensor(config: CollectivesConfig, count: int, rank: int) -> torch.Tensor:
    """Return one rank's tensor [count]: normally distributed values, or small integers whose sum does not overflow.

    At a share `config.overlap` of the positions, the magnitude is the same on all ranks; signs are independent. So a
    compressor that keeps the largest entries keeps the same positions on all ranks. At the other positions, the
    magnitudes are independent.
    """
    dtype = TORCH_DTYPES[config.dtype]
    private = torch.Generator().manual_seed(config.seed * 1_000_003 + 1 + rank)
    if not dtype.is_floating_point:
        limit = max(1, torch.iinfo(torch.int8).max // config.world_size)
        return torch.randint(-limit, limit + 1, (count,), generator=private, dtype=dtype)
    values = torch.randn(count, generator=private)
    if config.overlap:
        common = torch.Generator().manual_seed(config.seed * 1_000_003)
        magnitudes = torch.randn(count, generator=common).abs()
        is_common = torch.rand(count, generator=common) < config.overlap
        values = torch.where(is_common, magnitudes.copysign(values), values)
    return values.to(dtype)


@dataclasses.dataclass(kw_only=True)
class LinkCounter:
    """Count the bytes on the network link of this rank's virtual host; every rank must call each method.

    All ranks of a host count the same Ethernet frames.

    Attributes:
        uplink_bps, downlink_bps: rates of the host's link in bits per second; None if not limited.
        sent, received: bytes of whole Ethernet frames per sum; one value per round.
        forwarder_use: CPU use of the process that forwards frames, if the kernel does not forward them.
    """

    uplink_bps: float | None = None
    downlink_bps: float | None = None
    sent: list[float] = dataclasses.field(default_factory=list)
    received: list[float] = dataclasses.field(default_factory=list)
    forwarder_use: ForwarderUse = dataclasses.field(default_factory=ForwarderUse)

    @classmethod
    def of(cls, config: CollectivesConfig, rank: int) -> Self | None:
        """Return a counter for the virtual host of this rank, or None if the ranks run without virtual hosts."""
        if config.cluster is None:
            return None
        own = config.cluster["hosts"][rank // config.ranks_per_host]
        return cls(uplink_bps=own["uplink_bps"], downlink_bps=own["downlink_bps"])

    @contextlib.contextmanager
    def counting(self, transport: Transport, num_sums: int) -> Iterator[None]:
        """Count the link's bytes while a `with` block makes `num_sums` sums.

        Append the bytes per sum to the attributes `sent` and `received`.

        In the block, a barrier comes before each sum. The bytes of `num_sums` barriers are measured before the block
        and subtracted, because the measured time of a sum does not include its barrier either.
        """
        transport.barrier()
        first = interface_bytes()
        for _ in range(num_sums):
            transport.barrier()
        transport.barrier()  # wait, because a backend returns before the kernel has sent everything
        second = interface_bytes()
        self.forwarder_use.start()
        yield
        self.forwarder_use.stop()
        transport.barrier()
        third = interface_bytes()
        self.sent.append((third.sent - 2 * second.sent + first.sent) / num_sums)
        self.received.append((third.received - 2 * second.received + first.received) / num_sums)

    def columns(self, transport: Transport, time_s: float) -> dict[str, float | None]:
        """Return the columns of a row that describe the links, by name; `time_s` is the time of one sum in seconds."""
        sent, received = (sum(counts) / len(counts) for counts in (self.sent, self.received))
        (mean_sent,) = transport.all_reduce_scalars([sent / transport.world_size], "sum")
        loads = ((sent, self.uplink_bps), (received, self.downlink_bps))
        own_s = max(8 * nbytes / rate_bps if rate_bps else 0.0 for nbytes, rate_bps in loads)
        (least_s,) = transport.all_reduce_scalars([own_s], "max")
        return {
            "wire_bytes_sent": mean_sent,
            "of_limit": least_s / time_s if least_s else None,
            "forwarder_cpu_share": self.forwarder_use.share,
        }


def expected_sum(collective: Collective, payloads: list[Payload]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum that a collective must compute as a dense tensor [numel], and its largest allowed error.

    If the collective documents the order of its additions, the result must be the serial sum in this order, and the
    error is 0. Otherwise the result may differ from the exact sum by a proven bound [numel].
    """
    serial = serial_sum(collective, payloads)
    return (serial, torch.zeros(())) if serial is not None else error_bound(payloads)


def num_wrong(values: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> int:
    """Return how many elements of a dense sum [numel] are wrong; NaN is always wrong.

    Args:
        values: the sum to check.
        expected: the right sum.
        bound: the largest allowed difference, as a scalar or per element.
    """
    off = (values.to(expected.dtype) - expected).abs()
    return int((off > bound).logical_or(off.isnan()).sum())


class Summing:
    """Time and check the sums of one collective with the payloads of one compressor; every rank must call each method.

    Args:
        config: options of the command.
        collective: the collective as text, such as `server:root=1`.
        compressor: the compressor that made the payloads, as text.
        size_bytes: bytes of the tensor before compression.
        offer: the payloads to sum.
        transport: connects the ranks; the bytes that these sums send are counted apart from other traffic.
    """

    def __init__(
        self,
        config: CollectivesConfig,
        *,
        collective: str,
        compressor: str,
        size_bytes: int,
        offer: SyntheticPayloads,
        transport: Transport,
    ) -> None:
        self.collective = collective
        self.compressor = compressor
        self._config = config
        self._size_bytes = size_bytes
        self._offer = offer
        self._transport = transport.view(range(transport.world_size))
        self._transport.ledger = Ledger()
        component = on_links(cast(Collective, spec.build("collectives", collective)), link_rates(config))
        self._expected = expected_sum(component, offer.of_all)
        self.bound = component.bind(self._transport)
        self._p50s: list[float] = []
        self._p95s: list[float] = []
        self._num_wrong = 0
        self._sent = Traffic()
        self._link = LinkCounter.of(config, transport.rank)

    def measure_round(self) -> None:
        """Make `warmup` untimed sums, then `iters` timed sums, and count the wrong elements of the last result."""
        for _ in range(self._config.warmup):
            self._sum()
        durations = []
        link = self._link
        with link.counting(self._transport, self._config.iters) if link else contextlib.nullcontext():
            for _ in range(self._config.iters):
                seconds, values = self._sum()
                durations.append(seconds)
        slowest = torch.tensor(self._transport.all_reduce_scalars(durations, "max"), dtype=torch.float64)
        self._p50s.append(float(slowest.quantile(0.5)))
        self._p95s.append(float(slowest.quantile(0.95)))
        wrong = num_wrong(values, *self._expected)
        self._num_wrong += int(self._transport.all_reduce_scalars([wrong], "sum")[0])

    def report(self) -> dict[str, dict[str, Any]]:
        """Return the results of all rounds so far, by the name of the column.

        Returns:
            ``row``: the measured columns of `COLLECTIVES`. ``extras``: two values that are only printed: the share of
            entries that two ranks both send, and the bytes that the busiest rank sent per sum.
        """
        n = self._config.world_size
        messages, nbytes = self._transport.all_reduce_scalars([self._sent.messages / n, self._sent.nbytes / n], "sum")
        time_s = statistics.median(self._p50s)
        algbw, busbw = bandwidths(self._size_bytes, time_s, n)
        row = {
            "collective": self.collective,
            "payload": self.compressor,
            "size_bytes": self._size_bytes,
            "count": self._offer.own.numel,
            "time_p50_s": time_s,
            "time_p95_s": statistics.median(self._p95s),
            "algbw_Bps": algbw,
            "busbw_Bps": busbw,
            "num_wrong": self._num_wrong,
            "messages": None if self._sent.from_formula else messages,  # unknown for the backend's own sums
            "bytes_sent": nbytes,
            "wire_bytes_sent": None,
            "of_limit": None,
            "forwarder_cpu_share": None,
        }
        if self._link is not None:
            row |= self._link.columns(self._transport, time_s)
        (busiest,) = self._transport.all_reduce_scalars([self._sent.nbytes], "max")
        return {"row": row, "extras": {"overlap": self._offer.overlap, "bytes_sent_max": busiest}}

    def _sum(self) -> tuple[float, torch.Tensor]:
        """Return the seconds of one sum on this rank, and the sum as a dense tensor [numel]."""
        payload = copy.deepcopy(self._offer.own)
        self._transport.barrier()  # no rank starts before all have copied their payload
        before = sum(self._transport.traffic.values(), Traffic())  # the traffic of all purposes
        started = device_time(self._transport.device)
        total = self.bound.sum(payload, (0,))
        # After an all-gather, for example, the terms are only added here.
        values = total.values if isinstance(total, Dense) else total.to_dense()
        seconds = device_time(self._transport.device) - started
        self._sent = sum(self._transport.traffic.values(), Traffic()).since(before)
        return seconds, values


def bandwidths(size_bytes: int, time_s: float, world_size: int) -> tuple[float, float]:
    """Return the algorithm bandwidth and the bus bandwidth of an all-reduce, as nccl-tests define them.

    The algorithm bandwidth is the bytes of the tensor / the time of its sum. A compressed payload also counts with the
    size of the dense tensor, so the algorithm bandwidth may exceed the link's rate.

    The bus bandwidth is the bytes per second that each rank must have sent at least. In any all-reduce, each of n ranks
    must send at least 2(n-1)/n of the tensor: all except its own share, once to gather the terms and once to distribute
    the total. So the bus bandwidth can be compared with a link's rate for every n.

    Source: nccl-tests, doc/PERFORMANCE.md.

    Args:
        size_bytes: bytes of the dense tensor.
        time_s: seconds of the tensor's sum, above 0.
        world_size: number of ranks, at least 1.

    Returns:
        A tuple (algorithm bandwidth, bus bandwidth), both in bytes per second.
    """
    algbw = size_bytes / time_s
    return algbw, algbw * 2 * (world_size - 1) / world_size


def run(config: CollectivesConfig, folder: RunFolder) -> None:
    """Set up this rank, and measure every collective with every compressor at all tensor sizes."""
    origin = origin_columns(config.device) | {
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    }
    device = set_up_device(config.device, config.threads)
    with process_group(device, config.timeout_s):
        transport = open_transport(device=device, timeout_s=config.timeout_s)
        for size in parse_sizes(config.sizes):
            measure(config, size, folder, transport, origin)
        dist.barrier()
        transport.close()


def measure(
    config: CollectivesConfig, size: int, folder: RunFolder, transport: Transport, origin: dict[str, Any]
) -> None:
    """Measure each collective with each compressor at one tensor size; every rank must call this function.

    Args:
        config: options of the command.
        size: size of the tensor in bytes; the tensor has as many whole elements as fit into this size.
        folder: the job's folder, to which rank 0 writes progress and rows.
        transport: connects the ranks.
        origin: columns of every row that name the machine, the versions and the time of the start.
    """
    itemsize = BYTES_PER_ELEMENT[config.dtype]
    count = size // itemsize
    compressors = dict.fromkeys(compressor for _, compressor in config.pairs)
    offers = {name: make_synthetic_payloads(config, name, count, transport) for name in compressors}
    summings = [
        Summing(
            config,
            collective=collective,
            compressor=compressor,
            size_bytes=count * itemsize,
            offer=offers[compressor],
            transport=transport,
        )
        for collective, compressor in config.pairs
    ]
    is_reporter = dist.get_rank() == 0
    for _, summing in interleave(summings, config.rounds):
        summing.measure_round()
        if is_reporter:
            block = f"{summing.compressor} on {summing.collective}"
            append_json_line(folder.progress, {"ended": [format_bytes(count * itemsize), block]})
    shared = config.columns() | link_columns(folder) | origin
    for summing in summings:
        report = summing.report()
        if is_reporter:
            append_json_line(folder.progress, report | {"row": shared | report["row"]})
        summing.bound.close()


main = rank_main(CollectivesConfig, run, (BenchError, OptionError, PayloadError, TransportError))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
