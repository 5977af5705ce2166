"""Worker of `bench collectives`: each rank runs `python -m bench.extensions.microbenchmarks.collectives_worker FOLDER`.

The worker reads the folder's `config.json`. Rank 0 appends a line to `progress.jsonl` after every round of a pair, and
the rows of all pairs as soon as a size is finished.
"""

import contextlib
import copy
import dataclasses
import datetime
import statistics
import sys
from collections.abc import Iterator
from typing import Any, Self, cast

import torch
import torch.distributed as dist

from bench.core import spec
from bench.core.counters import ForwarderUse, interface_bytes
from bench.core.environment import origin_columns
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, append_json_line
from bench.extensions.microbenchmarks.interleave import interleave
from bench.extensions.microbenchmarks.options import CollectivesConfig
from bench.train.rank import (
    device_time,
    end_process,
    gather_bytes,
    link_columns,
    process_group,
    rank_main,
    set_up_device,
)
from bench.train.record import support_overlap
from collectives.base import Collective
from collectives.options import OptionError
from collectives.payloads import Dense, Payload, PayloadError, unpack
from collectives.serial import error_bound, serial_sum
from collectives.transport.base import Ledger, Traffic, Transport, TransportError
from collectives.transport.sockets import open_transport
from compressors.base import PerLayer
from compressors.ddp.reducer import PerLayerReducer
from compressors.ddp.report import Bucket
from compressors.layer import Layer, Step

TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "int32": torch.int32,
}
_INT8_MAX = 127


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticPayloads:
    """The payloads that the ranks sum.

    Attributes:
        own: this rank's payload; do not pass it to a collective, which may overwrite it.
        of_all: the payloads of all ranks in rank order, packed and unpacked once.
        overlap: share of entries that two ranks both send, mean over pairs of ranks; None if all elements are sent.
    """

    own: Payload
    of_all: list[Payload]
    overlap: float | None


def make_synthetic_payloads(
    config: CollectivesConfig, compressor: str, count: int, transport: Transport
) -> SyntheticPayloads:
    """Return all ranks' payloads, each of a tensor of `count` elements; every rank must call.

    Args:
        config: the configuration of the sweep.
        compressor: spec text; with `none`, the payload is the tensor in its own type.
        count: number of elements.
        transport: used by compressors whose ranks communicate before they encode.
    """
    tensor = synthetic_tensor(config, count, transport.rank).to(transport.device)
    own = payload_of(tensor, compressor, config, transport)
    packed = gather_bytes(own.pack().cpu().numpy().tobytes())
    of_all = [unpack(torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(transport.device)) for raw in packed]
    return SyntheticPayloads(own=own, of_all=of_all, overlap=support_overlap(of_all))


def payload_of(tensor: torch.Tensor, compressor: str, config: CollectivesConfig, transport: Transport) -> Payload:
    """Return the payload that a compressor produces for one layer at full compression; every rank must call.

    Args:
        tensor: 1-D tensor of a floating-point type; with compressor `none`, of any type.
        compressor: spec text; `none` keeps the tensor's own type.
        config: the configuration of the sweep.
        transport: used by compressors whose ranks communicate before they encode.
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


def synthetic_tensor(config: CollectivesConfig, count: int, rank: int) -> torch.Tensor:
    """Return one rank's tensor [count]: normally distributed values, or small integers whose sum does not overflow.

    At a share `config.overlap` of positions, all ranks have the same magnitude with independent signs, so that a
    sparsifier selects the same entries on all ranks. At other positions the magnitudes are independent.
    """
    dtype = TORCH_DTYPES[config.dtype]
    private = torch.Generator().manual_seed(config.seed * 1_000_003 + 1 + rank)
    if not dtype.is_floating_point:
        limit = max(1, _INT8_MAX // config.world_size)
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
    """Counter of the bytes on one host's link; every rank must call each method.

    All ranks of a host count the same frames.

    Attributes:
        uplink_bps, downlink_bps: this host's rates in bits per second; None if not limited.
        sent, received: bytes of whole frames per sum, one value per round.
        forwarder_use: CPU use of the process that forwards frames, if the kernel does not forward them.
    """

    uplink_bps: float | None = None
    downlink_bps: float | None = None
    sent: list[float] = dataclasses.field(default_factory=list)
    received: list[float] = dataclasses.field(default_factory=list)
    forwarder_use: ForwarderUse = dataclasses.field(default_factory=ForwarderUse)

    @classmethod
    def of(cls, config: CollectivesConfig, rank: int) -> Self | None:
        """Return the counter of this rank's virtual host; None if there are none, as nothing is counted then."""
        if config.cluster is None:
            return None
        own = config.cluster["hosts"][rank // config.ranks_per_host]
        return cls(uplink_bps=own["uplink_bps"], downlink_bps=own["downlink_bps"])

    @contextlib.contextmanager
    def counting(self, transport: Transport, num_sums: int) -> Iterator[None]:
        """Count the bytes of the block, which makes `num_sums` sums, each after one barrier.

        The bytes of `num_sums` barriers are measured before and subtracted, because a sum's time excludes its barrier
        too.
        """
        transport.barrier()
        first = interface_bytes()
        for _ in range(num_sums):
            transport.barrier()
        transport.barrier()  # a backend returns before the kernel has sent everything
        second = interface_bytes()
        self.forwarder_use.start()
        yield
        self.forwarder_use.stop()
        transport.barrier()
        third = interface_bytes()
        self.sent.append((third.sent - 2 * second.sent + first.sent) / num_sums)
        self.received.append((third.received - 2 * second.received + first.received) / num_sums)

    def columns(self, transport: Transport, time_s: float) -> dict[str, float | None]:
        """Return the link's columns of `COLLECTIVES`; `time_s` is the time of a sum, and every rank must call."""
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


_NO_LINK = {"wire_bytes_sent": None, "of_limit": None, "forwarder_cpu_share": None}
KEY = (0,)


class Expected:
    """The result that a collective must have: exactly the serial sum if the order of additions is known.

    Otherwise the result may differ from the exact sum by a proven error bound.
    """

    def __init__(self, collective: Collective, payloads: list[Payload]) -> None:
        serial = serial_sum(collective, payloads)
        self._expected, self._bound = (serial, torch.zeros(())) if serial is not None else error_bound(payloads)

    def num_wrong(self, values: torch.Tensor) -> int:
        """Return the number of wrong elements of a dense sum [numel]; NaN is always wrong."""
        off = (values.to(self._expected.dtype) - self._expected).abs()
        return int((off > self._bound).logical_or(off.isnan()).sum())


class Summing:
    """Measurement of a pair at one size; every rank must call each method.

    Args:
        config: the configuration of the sweep.
        collective: spec text.
        compressor: spec text of the compressor that made the payloads.
        size_bytes: bytes of the tensor that the payloads represent.
        offer: the payloads to sum.
        transport: connects the ranks; its traffic here is counted separately.
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
        component = cast(Collective, spec.build("collectives", collective))
        self._expected = Expected(component, offer.of_all)
        self.bound = component.bind(self._transport)
        self._p50s: list[float] = []
        self._p95s: list[float] = []
        self._num_wrong = 0
        self._sent = _sent(self._transport)
        self._link = LinkCounter.of(config, transport.rank)

    def measure_round(self) -> None:
        """Make `warmup` untimed sums, then `iters` timed ones; check the result of the last."""
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
        self._num_wrong += int(self._transport.all_reduce_scalars([self._expected.num_wrong(values)], "sum")[0])

    def row(self) -> dict[str, Any]:
        """Return this pair's columns of `COLLECTIVES` from all rounds so far."""
        n = self._config.world_size
        messages, nbytes = self._transport.all_reduce_scalars([self._sent.messages / n, self._sent.nbytes / n], "sum")
        time_s = statistics.median(self._p50s)
        algbw = algorithm_bandwidth(self._size_bytes, time_s)
        return {
            "collective": self.collective,
            "payload": self.compressor,
            "size_bytes": self._size_bytes,
            "count": self._offer.own.numel,
            "time_p50_s": time_s,
            "time_p95_s": statistics.median(self._p95s),
            "algbw_Bps": algbw,
            "busbw_Bps": bus_bandwidth(algbw, n),
            "num_wrong": self._num_wrong,
            "messages": None if self._sent.from_formula else messages,
            "bytes_sent": nbytes,
        } | (self._link.columns(self._transport, time_s) if self._link else _NO_LINK)

    def extras(self) -> dict[str, Any]:
        """Return values that are only printed: the overlap of index sets, and the bytes that the busiest rank sent."""
        (busiest,) = self._transport.all_reduce_scalars([self._sent.nbytes], "max")
        return {"overlap": self._offer.overlap, "bytes_sent_max": busiest}

    def _sum(self) -> tuple[float, torch.Tensor]:
        """Return the seconds of one sum on this rank, and the sum as a dense tensor [numel].

        If the payload has elements of several types, they are sent one type after the other.
        """
        payload = copy.deepcopy(self._offer.own)
        self._transport.barrier()  # no rank starts before all have copied their payload
        before = _sent(self._transport)
        started = device_time(self._transport.device)
        total = self.bound.sum(payload, KEY)
        # After an all-gather, for example, the terms are only added here.
        values = total.values if isinstance(total, Dense) else total.to_dense()
        seconds = device_time(self._transport.device) - started
        self._sent = _sent(self._transport).since(before)
        return seconds, values


def _sent(transport: Transport) -> Traffic:
    # traffic of all purposes; the messages of the backend's own collectives are unknown
    return sum(transport.traffic.values(), Traffic())


def algorithm_bandwidth(size_bytes: int, time_s: float) -> float:
    """Return the bytes of the tensor / the time of its sum; `time_s` > 0.

    For a compressed payload, this uses the size of the dense tensor, so it may exceed the link's rate.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return size_bytes / time_s


def bus_bandwidth(algbw: float, world_size: int) -> float:
    """Return the bytes per second that each of `world_size` >= 1 ranks must have sent at least.

    In any all-reduce, each of n ranks must send at least 2(n-1)/n of the tensor: all except its own share, once to
    gather the terms and once to distribute the total. So this value can be compared with a link's rate for every n.
    """
    return algbw * 2 * (world_size - 1) / world_size


def run(config: CollectivesConfig, folder: RunFolder) -> None:
    """Set up this rank and measure all sizes."""
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    origin = origin_columns(config.device) | {"started_at": started_at}
    device = set_up_device(config.device, config.threads)
    with process_group(device, config.timeout_s):
        transport = open_transport(device=device, timeout_s=config.timeout_s)
        for size in config.sizes_bytes:
            measure(config, size, folder, transport, origin)
        dist.barrier()
        transport.close()


def measure(
    config: CollectivesConfig, size: int, folder: RunFolder, transport: Transport, origin: dict[str, Any]
) -> None:
    """Measure all pairs at one size in alternating rounds; every rank must call."""
    compressors = dict.fromkeys(compressor for _, compressor in config.pairs)
    offers = {name: make_synthetic_payloads(config, name, config.count(size), transport) for name in compressors}
    summings = [
        Summing(
            config,
            collective=collective,
            compressor=compressor,
            size_bytes=config.size_bytes(size),
            offer=offers[compressor],
            transport=transport,
        )
        for collective, compressor in config.pairs
    ]
    is_reporter = dist.get_rank() == 0
    for _, summing in interleave(summings, config.rounds):
        summing.measure_round()
        if is_reporter:
            append_json_line(
                folder.progress, {"turn": [summing.collective, summing.compressor, config.size_bytes(size)]}
            )
    shared = config.columns() | link_columns(folder) | origin
    for summing in summings:
        line = {"row": shared | summing.row(), "extras": summing.extras()}
        if is_reporter:
            append_json_line(folder.progress, line)
        summing.bound.close()


main = rank_main(CollectivesConfig, run, (BenchError, OptionError, PayloadError, TransportError))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
