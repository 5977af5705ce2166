"""The host process: it loads the model onto the devices, sends them mini-batches and commands, and collects reports.

The host can also add the devices' gradients: `HostSum` is the devices' side of this sum, `serve_sum` the host's side.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from bench.core.config.run import RunConfig
from bench.extensions.place.assignment import Plan
from bench.extensions.place.device import Stage
from bench.extensions.place.messages import (
    HOST_RANK,
    as_dicts,
    from_dicts,
    hear,
    receive_all_,
    receive_bytes,
    send_all,
    send_tensor,
    tell,
)
from bench.models.base import pooled_buffers
from bench.strategies.base import Batch, BoundStrategy
from collectives.base import BoundCollective, Collective, PendingSum, SumEncoder
from collectives.payloads.base import Payload, unpack
from collectives.schedule.rounds import Layout
from collectives.server import added
from collectives.transport.base import Purpose, ReduceOp, Traffic, Transport, wait_all
from gradwire.exchange.report import EncodedLayer, StepReport


class HostTraining(BoundStrategy):
    """Command all devices and count their traffic; devices hold the trained parameters, and the host has a copy.

    Args:
        config: the run's configuration.
        model: the network, not wrapped in DDP; `synchronize` updates its parameters.
        plan: the map from ranks to devices.
        stages: each device's part of the network, by rank; tells the host what each device holds.
        transport: connects all processes.
        loop: a process group that contains only the host.
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
        super().__init__(model, exchanges=())
        self.loop = loop
        self._config = config
        self._plan = plan
        self._stages = stages
        self._transport = transport
        self._is_loaded = False
        self._reports: dict[int, dict[str, Any]] = {}
        self._ranks = sorted(stages)
        self._counted: dict[int, Mapping[Purpose, Traffic]] = {rank: {} for rank in self._ranks}
        self._links_counted: dict[tuple[int, int], int] = {}
        self._batch_bytes = dict.fromkeys(self._ranks, 0)

    @property
    @override
    def traffic(self) -> Mapping[Purpose, Traffic]:
        return self._transport.traffic  # of the host only; `replica_figures` returns the devices' traffic

    @override
    def residual_norms(self) -> dict[int, float]:
        return {  # of the first replica, as of the last evaluation
            int(layer): norm
            for rank in self._plan.ranks[0]
            for layer, norm in self._reports.get(rank, {}).get("residual_norms", {}).items()
        }

    @override
    def train_step(self, batch: Batch) -> StepReport:
        """Send a mini-batch to each replica, wait until every device has updated its parameters, and return a report.

        With the sync trigger, also command the exchange of gradients once all devices have finished backward.
        """
        if not self._is_loaded:  # only now, because devices first look for a checkpoint
            for rank, stage in self._stages.items():
                tell(self._transport, rank, {"command": "load"})
                send_all(self._transport, rank, [*stage.parameters.values(), *stage.buffers.values()])
        self._is_loaded = True
        step = {name: getattr(batch.step, name) for name in ("index", "epoch", "seed", "warmup")}
        self._tell_all({"command": "batch", "step": step, "lr": batch.lr})
        parts = (tensor.split(self._config.batch_size) for tensor in (batch.x, batch.y))
        for replica, x, y in zip(self._plan.ranks, *parts, strict=True):
            for rank in replica:
                for tensor, is_needed in ((x, self._stages[rank].takes_input), (y, self._stages[rank].makes_result)):
                    if is_needed:
                        with self._transport.counted_as("activation"):
                            pendings, nbytes = send_tensor(self._transport, tensor, rank)
                            wait_all(pendings)
                        self._batch_bytes[rank] += nbytes
        losses = [hear(self._transport, rank)["loss"] for rank in self._ranks if self._stages[rank].makes_result]
        batch.on_loss(torch.tensor(losses).mean())
        if self._config.trigger == "sync":
            for rank in self._ranks:
                hear(self._transport, rank)
            self._tell_all({"command": "reduce"})
        skip = any(report["nonfinite"] for report in self._hear_all())
        self._tell_all({"skip": skip})
        reports = self._hear_all()
        layers = {layer.id: layer for layer in self.layers}
        return StepReport(
            skipped=skip,
            encode_s=max(report["encode_s"] for report in reports),
            exchange_s=max(report["exchange_s"] for report in reports),
            exposed_s=statistics.mean(report["exposed_s"] for report in reports),
            encoded=[
                EncodedLayer(**part | {"layer": layers[part["layer"]]})
                for report in reports
                for part in report["encoded"]
            ],
        )

    def _hear_all(self) -> list[dict[str, Any]]:
        """Return the next report of every device; meanwhile, compute the sums of gradients that devices request.

        The host serves the devices of one part of the network until they have reported, then those of the next part. So
        a device must report without waiting for sums of another part.
        """
        reports: list[dict[str, Any]] = []
        for ranks in zip(*self._plan.ranks, strict=True):  # the devices that hold the same part of every replica
            while "sum" in (messages := [hear(self._transport, rank) for rank in ranks])[0]:
                serve_sum(self._transport, ranks, messages)
            reports += messages
        return reports

    @override
    def synchronize(self) -> None:
        """Fetch the first replica's parameters, and pool the buffers (running statistics) of all replicas."""
        self._tell_all({"command": "report"})
        for peers in zip(*self._plan.ranks, strict=True):  # the devices that hold the same part of every replica
            stage = self._stages[peers[0]]
            buffers = list(stage.buffers.values())
            of_replicas = []
            for rank in peers:
                self._reports[rank] = hear(self._transport, rank)
                if rank == peers[0]:
                    receive_all_(self._transport, rank, list(stage.parameters.values()))
                receive_all_(self._transport, rank, buffers)
                of_replicas.append([buffer.clone() for buffer in buffers])
            stacks = dict(zip(stage.buffers, map(torch.stack, zip(*of_replicas, strict=True)), strict=True))
            variances = [name for name in stacks if name.endswith("running_var")]
            for name, pooled in pooled_buffers(stacks, variances, _means).items():
                stage.buffers[name].copy_(pooled)

    @override
    def state_dict(self) -> dict[str, Any]:
        # Every device saves its parameters and state; the host itself only saves its counters.
        self._tell_all({"command": "checkpoint"})
        return {
            "reports": self._reports,
            "counted": {rank: as_dicts(traffic) for rank, traffic in self._counted.items()},
            "links_counted": list(self._links_counted.items()),
            "batch_bytes": self._batch_bytes,
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reports = state["reports"]
        self._counted = {rank: from_dicts(traffic) for rank, traffic in state["counted"].items()}
        self._links_counted = dict(state["links_counted"])
        self._batch_bytes = state["batch_bytes"]

    @override
    def replica_figures(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return one dict of figures per replica, computed from the reports of the replica's devices.

        The figures are what the devices sent since the last call, and their CPU time, memory and weights. Call this
        method once per `synchronize`.

        Args:
            own: the host's figures; its CPU time and samples are divided equally among the replicas.
        """
        part = 1 / len(self._plan.ranks)
        of_host = own["cpu_s_per_step"]
        replicas = []
        for ranks in self._plan.ranks:
            reports = [self._reports[rank] for rank in ranks]
            now = {rank: from_dicts(report["traffic"]) for rank, report in zip(ranks, reports, strict=True)}
            sent = dict.fromkeys(get_args(Purpose), Traffic())
            for rank, purpose in itertools.product(ranks, sent):
                sent[purpose] += now[rank][purpose].since(self._counted[rank].get(purpose, Traffic()))
            self._counted |= now
            cpu_s = [report["cpu_s_per_step"] for report in reports if report["cpu_s_per_step"] is not None]
            is_timed = of_host is not None and cpu_s
            replicas.append(
                own
                | {
                    "samples": own["samples"] // len(self._plan.ranks),
                    "traffic": as_dicts(sent),
                    "weights": "".join(report["weights"] for report in reports),
                    "cpu_s_per_step": (sum(cpu_s) + part * of_host) / (len(cpu_s) + part) if is_timed else None,
                    "peak_rss_bytes": max(own["peak_rss_bytes"], *(report["peak_rss_bytes"] for report in reports)),
                    "held_bytes": max(report["held_bytes"] for report in reports),
                }
            )
        return replicas

    @override
    def link_rows(self, num_steps: int) -> list[dict[str, Any]]:
        """Return a row for each pair of processes between which mini-batches, activations or their gradients were sent.

        Each row gives the bytes per step since the last call of this method.

        Args:
            num_steps: number of steps since the last call.
        """
        totals = {(HOST_RANK, rank): nbytes for rank, nbytes in self._batch_bytes.items() if nbytes}
        for rank, report in self._reports.items():
            totals |= {(rank, int(to)): nbytes for to, nbytes in report["links"].items()}
        before, self._links_counted = self._links_counted, totals
        names = self._plan.names
        return [
            {
                "source": names[source],
                "to": names[to],
                "activation_bytes": (nbytes - before.get((source, to), 0)) / max(1, num_steps),
            }
            for (source, to), nbytes in sorted(totals.items())
        ]

    @override
    def close(self) -> None:
        self._tell_all({"command": "stop"})
        super().close()

    def _tell_all(self, message: dict[str, Any]) -> None:
        for rank in self._ranks:
            tell(self._transport, rank, message)


class HostSum(Collective):
    """Sum payloads at the host: the collective that devices use with the option merge=host.

    Args:
        to_host: the transport that connects all processes, including the host.
    """

    def __init__(self, to_host: Transport) -> None:
        super().__init__()
        self.to_host = to_host

    @override
    def bind(self, transport: Transport, encoder: SumEncoder | None = None) -> BoundHostSum:
        return BoundHostSum(self, transport)

    @override
    def check_compatible(self, kind: type[Payload]) -> None:
        """Accept every kind of payload."""

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> None:
        """Return None, because a schedule of messages between ranks cannot include the host."""


class BoundHostSum(BoundCollective):
    """Send this device's payload to the host, and receive the sum that the host computes with `serve_sum`."""

    options: HostSum

    @override
    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        to_host, packed = self.options.to_host, payload.pack().cpu()
        tell(to_host, HOST_RANK, {"sum": op, "nbytes": packed.numel()})
        to_host.send(packed, HOST_RANK).wait()
        answer = receive_bytes(to_host, HOST_RANK, hear(to_host, HOST_RANK)["nbytes"])
        return PendingSum.done(unpack(answer.to(packed.device)))


def serve_sum(transport: Transport, ranks: Sequence[int], requests: Sequence[dict[str, Any]]) -> None:
    """Receive one payload from each of the given devices, add the payloads, and send the sum to each of these devices.

    Args:
        transport: connects all processes.
        ranks: the devices' ranks.
        requests: each device's request, in the order of `ranks`: {"sum": reduce operation, "nbytes": payload's size}.
    """
    terms = [
        unpack(receive_bytes(transport, rank, request["nbytes"])) for rank, request in zip(ranks, requests, strict=True)
    ]
    answer = added(terms, requests[0]["sum"]).pack()
    for rank in ranks:
        tell(transport, rank, {"nbytes": answer.numel()})
    wait_all([transport.send(answer, rank) for rank in ranks])


def _means(stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [stack.sum(dim=0) / len(stack) for stack in stacks]
