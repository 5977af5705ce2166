"""The host process: it loads the model onto the devices, sends them mini-batches and commands, and collects reports.

It can also add the devices' gradients: `HostSum` is the devices' side of this, `serve_sum` the host's.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Self, get_args

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from bench.core.config.run import RunConfig
from bench.strategies.base import BoundStrategy, LinkBytes
from bench.strategies.placed.messages import HOST_RANK, hear, receive_all_, send_all, send_tensor, tell
from bench.strategies.placed.plan import Plan
from bench.strategies.placed.stage import Stage
from collectives.base import BoundCollective, Collective, Downlink, Key
from collectives.payloads.base import Payload, unpack
from collectives.schedule.layout import Layout
from collectives.server import added
from collectives.transport.base import Purpose, ReduceOp, Traffic, Transport, wait_all
from compressors.ddp.report import EncodedLayer, StepReport
from compressors.layer import Layer, Step, layers_of


class HostTraining(BoundStrategy):
    """Drive the devices from the training loop; the trained parameters lie on them, and the host has a copy.

    Args:
        config: the run's configuration.
        model: the bare network; `synchronize` updates its parameters.
        plan: which process is which device.
        stages: each device's part of the network, by rank; here it only describes what lies on the device.
        transport: connects all processes.
        loop: a process group of the host only.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        plan: Plan,
        stages: Mapping[int, Stage],
        transport: Transport,
        loop: dist.ProcessGroup,
    ) -> None:
        self.devices = Devices(config, plan, stages, transport, layers_of(model))
        super().__init__(model, model, self.devices, loop)
        self._plan = plan
        self._config = config
        self._num_steps = 0
        self._step: dict[str, Any] = {}
        self._lr = 0.0

    @override
    def begin(self) -> None:
        """Load the network onto the devices, which receive it once they have looked for a checkpoint."""
        self.devices.load()

    @property
    @override
    def shard_ids(self) -> Sequence[int]:
        return range(self._plan.num_replicas)

    @override
    def start_step(self, step: Step, lr: float) -> None:
        self._step = {"index": step.index, "epoch": step.epoch, "seed": step.seed, "warmup": step.warmup}
        self._lr = lr

    @override
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Send one mini-batch to each replica and return the mean loss; the devices continue with backward."""
        size = self._config.batch_size
        return self.devices.train(self._step, self._lr, x.split(size), y.split(size))

    @override
    def backward(self, loss: torch.Tensor) -> None:
        """Do nothing: the devices run backward by themselves."""

    @override
    def update(self, outcome: StepReport) -> int:
        self._num_steps += 1
        return self._num_steps

    @override
    def synchronize(self) -> None:
        self.devices.collect()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what the host has counted; every device saves its own parameters and state."""
        return {"devices": self.devices.state_dict(), "num_steps": self._num_steps}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.devices.load_state_dict(state["devices"])
        self._num_steps = state["num_steps"]

    @override
    def members(self, figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return one entry per replica: what its devices sent in sum, and the time and memory of devices and host."""
        (own,) = figures
        share = {"samples": own["samples"] // len(self.shard_ids)}
        return [own | share | replica for replica in self.devices.figures(own)]

    @override
    def stop_workers(self) -> None:
        self.devices.stop()

    @override
    def link_bytes(self) -> list[LinkBytes]:
        return self.devices.link_bytes()


class Devices:
    """Command all devices from the host, and count what they exchange."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        stages: Mapping[int, Stage],
        transport: Transport,
        layers: Sequence[Layer],
    ) -> None:
        self._config = config
        self._plan = plan
        self._stages = stages
        self._transport = transport
        self._names = {
            rank: device.name
            for ranks, pool in zip(plan.ranks, plan.pools, strict=True)
            for rank, device in zip(ranks, pool, strict=True)
        }
        self._layers = {layer.id: layer for layer in layers}
        self._reports: dict[int, dict[str, Any]] = {}
        self._counted: dict[int, dict[Purpose, Traffic]] = {rank: _nothing() for rank in self._names}
        self._links_counted: dict[tuple[int, int], int] = {}
        self._batch_bytes: dict[int, int] = dict.fromkeys(self._names, 0)

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Return what the host sent; `figures` returns what the devices sent."""
        return self._transport.traffic

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """Return nothing: the host encodes nothing."""
        return {}

    def residual_norms(self) -> dict[int, float]:
        """Return the L2 norm of each layer's residual in the first replica, by layer id, as of the last `collect`."""
        return {
            int(layer): norm
            for rank in self._plan.ranks[0]
            for layer, norm in self._reports.get(rank, {}).get("residual_norms", {}).items()
        }

    def load(self) -> None:
        """Send every device its part of the network's state."""
        for rank, stage in self._stages.items():
            tell(self._transport, rank, {"command": "load"})
            send_all(self._transport, rank, [*stage.parameters().values(), *stage.buffers().values()])

    def train(
        self, step: Mapping[str, Any], lr: float, inputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Start a step on every replica, each with its own mini-batch; return the mean loss."""
        for rank in self._plan.device_ranks:
            tell(self._transport, rank, {"command": "batch", "step": dict(step), "lr": lr})
        for ranks, x, y in zip(self._plan.ranks, inputs, labels, strict=True):
            for rank in ranks:
                if self._stages[rank].takes_input:
                    self._send(x, rank)
                if self._stages[rank].makes_result:
                    self._send(y, rank)
        makers = [rank for rank in self._plan.device_ranks if self._stages[rank].makes_result]
        return torch.tensor([hear(self._transport, rank)["loss"] for rank in makers]).mean()

    def finish_step(self) -> StepReport:
        """Wait until every device has updated its parameters; with the sync trigger, first command the exchange."""
        ranks = self._plan.device_ranks
        if self._config.trigger == "sync":
            for rank in ranks:
                hear(self._transport, rank)
            for rank in ranks:
                tell(self._transport, rank, {"command": "reduce"})
        skip = any(report["nonfinite"] for report in self._hear_all())
        for rank in ranks:
            tell(self._transport, rank, {"skip": skip})
        outcomes = self._hear_all()
        return StepReport(
            skipped=skip,
            encode_s=max(outcome["encode_s"] for outcome in outcomes),
            exchange_s=max(outcome["exchange_s"] for outcome in outcomes),
            exposed_s=statistics.mean(outcome["exposed_s"] for outcome in outcomes),
            encoded=[
                EncodedLayer(**(part | {"layer": self._layers[part["layer"]]}))
                for outcome in outcomes
                for part in outcome["encoded"]
            ],
        )

    def _hear_all(self) -> list[dict[str, Any]]:
        """Return the next report of every device; requests for a sum that come before it are served.

        The host serves one part of the network after another, so a device must not wait for another part's sums before
        it reports.
        """
        reports: list[dict[str, Any]] = []
        for index in range(len(self._plan.ranks[0])):
            ranks = self._plan.peers(index)
            while "sum" in (messages := [hear(self._transport, rank) for rank in ranks])[0]:
                serve_sum(self._transport, ranks, messages)
            reports += messages
        return reports

    def state_dict(self) -> dict[str, Any]:
        """Make every device save its state; return what the host has counted."""
        for rank in self._plan.device_ranks:
            tell(self._transport, rank, {"command": "checkpoint"})
        counted = {
            rank: {purpose: dataclasses.asdict(entry) for purpose, entry in traffic.items()}
            for rank, traffic in self._counted.items()
        }
        return {
            "reports": self._reports,
            "counted": counted,
            "links_counted": self._links_counted,
            "dealt_bytes": self._batch_bytes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; devices restore their own states."""
        self._reports = state["reports"]
        self._counted = {
            rank: {purpose: Traffic(**entry) for purpose, entry in traffic.items()}
            for rank, traffic in state["counted"].items()
        }
        self._links_counted = state["links_counted"]
        self._batch_bytes = state["dealt_bytes"]

    def collect(self) -> None:
        """Fetch the first replica's parameters, and average running statistics over replicas, on host and devices."""
        for rank in self._plan.device_ranks:
            tell(self._transport, rank, {"command": "report"})
        for index, first in enumerate(self._plan.ranks[0]):
            stage = self._stages[first]
            buffers = list(stage.buffers().values())
            sums = [torch.zeros_like(buffer) for buffer in buffers]
            for rank in self._plan.peers(index):
                self._reports[rank] = hear(self._transport, rank)
                if rank == first:
                    receive_all_(self._transport, rank, list(stage.parameters().values()))
                receive_all_(self._transport, rank, buffers)
                for total, buffer in zip(sums, buffers, strict=True):
                    total += buffer
            for total, buffer in zip(sums, buffers, strict=True):
                if buffer.is_floating_point():
                    buffer.copy_(total / self._plan.num_replicas)
            for rank in self._plan.peers(index):
                send_all(self._transport, rank, buffers)

    def figures(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what each replica sent between the last two `collect`s, its CPU time, memory and weights' hash.

        Call once per `collect`. The host's `own` figures are shared out equally over the replicas.
        """
        return [self._figures_of(ranks) | self._resources_of(ranks, own) for ranks in self._plan.ranks]

    def _resources_of(self, ranks: Sequence[int], own: Mapping[str, Any]) -> dict[str, Any]:
        reports = [self._reports[rank] for rank in ranks]
        part = 1 / len(self._plan.ranks)
        cpu_s = [report["cpu_s_per_step"] for report in reports if report["cpu_s_per_step"] is not None]
        of_host = own["cpu_s_per_step"]
        return {
            "cpu_s_per_step": (
                None if of_host is None or not cpu_s else (sum(cpu_s) + part * of_host) / (len(cpu_s) + part)
            ),
            "peak_rss_bytes": max(own["peak_rss_bytes"], *(report["peak_rss_bytes"] for report in reports)),
        }

    def _figures_of(self, ranks: Sequence[int]) -> dict[str, Any]:
        sent = _nothing()
        for rank in ranks:
            now = {purpose: Traffic(**entry) for purpose, entry in self._reports[rank]["traffic"].items()}
            for purpose in sent:
                sent[purpose] += now[purpose].since(self._counted[rank][purpose])
            self._counted[rank] = now
        return {
            "traffic": {purpose: dataclasses.asdict(entry) for purpose, entry in sent.items()},
            "weights": "".join(self._reports[rank]["weights"] for rank in ranks),
        }

    def link_bytes(self) -> list[LinkBytes]:
        """Return bytes of mini-batches, activations and their gradients since the last call, by sender and receiver."""
        totals = {(HOST_RANK, rank): nbytes for rank, nbytes in self._batch_bytes.items() if nbytes}
        for rank, report in self._reports.items():
            totals |= {(rank, int(to)): nbytes for to, nbytes in report["links"].items()}
        names = {HOST_RANK: self._plan.host} | self._names
        rows = [
            LinkBytes(source=names[source], to=names[to], nbytes=nbytes - self._links_counted.get((source, to), 0))
            for (source, to), nbytes in sorted(totals.items())
        ]
        self._links_counted = totals
        return rows

    def stop(self) -> None:
        """Command every device to stop."""
        for rank in self._plan.device_ranks:
            tell(self._transport, rank, {"command": "stop"})

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _send(self, tensor: torch.Tensor, rank: int) -> None:
        with self._transport.counted_as("activation"):
            pendings, nbytes = send_tensor(self._transport, tensor, rank)
            wait_all(pendings)
        self._batch_bytes[rank] += nbytes


def _nothing() -> dict[Purpose, Traffic]:
    return {purpose: Traffic() for purpose in get_args(Purpose)}


@dataclasses.dataclass(kw_only=True)
class HostSum(Collective):
    """Sum payloads at the host; devices use it instead of the run's collective with merge=host.

    Attributes:
        to_host: the transport that connects all processes, including the host.
    """

    to_host: Transport = dataclasses.field(init=False)  # not an option

    @classmethod
    def over(cls, transport: Transport) -> Self:
        """Return a collective that reaches the host over this transport."""
        collective = cls()
        collective.to_host = transport
        return collective

    @override
    def bind(self, transport: Transport, downlink: Downlink | None = None) -> BoundHostSum:
        return BoundHostSum(self, transport)

    @override
    def check_compatible(self, kind: type[Payload]) -> None:
        """Accept every kind."""

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> None:
        """Return nothing: the schedule has no host."""


class BoundHostSum(BoundCollective):
    """Run a device's side of the sum; `serve_sum` is the host's."""

    options: HostSum

    @override
    def sum_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> Payload:
        to_host, packed = self.options.to_host, payload.pack().cpu()
        tell(to_host, HOST_RANK, {"sum": op, "nbytes": packed.numel()})
        to_host.send(packed, HOST_RANK).wait()
        answer = torch.empty(hear(to_host, HOST_RANK)["nbytes"], dtype=torch.uint8)
        to_host.receive_into(answer, HOST_RANK).wait()
        return unpack(answer.to(packed.device))


def serve_sum(transport: Transport, ranks: Sequence[int], asked: Sequence[dict[str, Any]]) -> None:
    """Receive payloads from some devices, add them, and send the sum to each.

    Args:
        transport: connects all processes.
        ranks: the devices.
        asked: each device's request.
    """
    terms = []
    for rank, request in zip(ranks, asked, strict=True):
        packed = torch.empty(request["nbytes"], dtype=torch.uint8)
        transport.receive_into(packed, rank).wait()
        terms.append(unpack(packed))
    answer = added(terms, asked[0]["sum"]).pack()
    for rank in ranks:
        tell(transport, rank, {"nbytes": answer.numel()})
    wait_all([transport.send(answer, rank) for rank in ranks])
