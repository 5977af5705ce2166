"""A device process: it holds a part of one replica, computes on the host's commands, and sums gradients with its peers.

Its peers are the devices that hold the same part of the other replicas.

Its states, with the host's commands on the arrows:

    idle -load-> loaded -batch-> compute -> done [-reduce->] reduce -> updated -> wait -batch-> compute ...

With the async trigger the device goes from done to reduce by itself; with the sync trigger the host commands it once
all devices are done. The device goes from reduce to updated when the host has told it whether the step is skipped,
which depends on all devices.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from bench.core.config.run import RunConfig
from bench.core.config.syntax import Straggler
from bench.core.processes import peak_rss_bytes
from bench.models.base import weights_hash
from bench.optimizers.base import Optimizer
from bench.strategies.base import CommandedRank, SaveState
from bench.strategies.placed.messages import (
    HOST_RANK,
    as_dicts,
    from_dicts,
    hear,
    receive_all_,
    receive_tensor,
    send_all,
    tell,
)
from bench.strategies.placed.stage import Stage
from collectives.pool import BoundPool
from collectives.transport.base import Transport
from compressors.ddp.communicator import CompressedCommunicator, zero_nonfinite_
from compressors.ddp.hook import NonFiniteGradient
from compressors.ddp.report import StepReport
from compressors.layer import Step

DeviceState = Literal["idle", "loaded", "compute", "done", "reduce", "updated", "wait"]

_NEXT: Mapping[DeviceState, DeviceState] = {
    "idle": "loaded",
    "loaded": "compute",
    "compute": "done",
    "done": "reduce",
    "reduce": "updated",
    "updated": "wait",
    "wait": "compute",
}


class DeviceProcess(CommandedRank):
    """Run this process as one device, on the host's commands.

    Args:
        config: the run's configuration.
        stage: this device's part of a replica.
        replica: index of the replica.
        channel: connects the devices that hold the same part of all replicas, and sums their gradients.
        transport: connects all processes.
        optimizer: updates this device's parameters.
    """

    def __init__(
        self,
        config: RunConfig,
        stage: Stage,
        replica: int,
        channel: CompressedCommunicator,
        transport: Transport,
        optimizer: Optimizer,
    ) -> None:
        self.state: DeviceState = "idle"
        self._config = config
        self._stage = stage
        self._replica = replica
        self._channel = channel
        self._transport = transport
        self._parameters = list(stage.parameters().values())
        self._buffers = list(stage.buffers().values())
        self._optimizer = (
            optimizer.bind(nn.ParameterList(self._parameters), config.lr, channel) if self._parameters else None
        )
        straggler = Straggler.parse(config.straggler) if config.straggler else None
        self._slowdown = straggler.slowdown if straggler and straggler.rank == transport.rank else 1.0
        # Whether gradients are averaged over replicas.
        self._averages = bool(self._parameters) and channel.transport.world_size > 1 and not optimizer.keeps_gradients
        self._restored: dict[str, Any] | None = None
        self._num_steps = self._num_steps_here = 0
        self._cpu_s: list[float] = []  # CPU seconds of each timed step since the last report
        self._in_pool = self._gradients_in_pool() if self._averages else None

    @override
    def follow(self, save: SaveState) -> None:
        """Carry out the host's commands until it sends "stop".

        Raises:
            TransportError: another process was lost.
            NonFiniteGradient: a gradient was not finite, and the run's option `nonfinite` is "raise".
        """
        while (message := hear(self._transport, HOST_RANK))["command"] != "stop":
            match message["command"]:
                case "load":
                    receive_all_(self._transport, HOST_RANK, [*self._parameters, *self._buffers])
                    self._restore()
                    self._enter("loaded")
                case "checkpoint":
                    save(
                        self._num_steps,
                        {
                            "parameters": self._parameters,
                            "buffers": self._buffers,
                            "optimizer": self._optimizer.state_dict() if self._optimizer is not None else {},
                            "channel": self._channel.state_dict(),
                            "num_steps": self._num_steps,
                            "traffic": as_dicts(self._transport.traffic),
                            "links": dict(self._stage.sent_bytes),
                        },
                    )
                case "batch":
                    self._train(
                        Step(rank=self._replica, world_size=self._config.replicas, **message["step"]), message["lr"]
                    )
                case "report":
                    self._report()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state  # takes effect when the host has loaded the model onto the devices, its first command

    @override
    def close(self) -> None:
        dist.barrier()  # all processes close together
        self._channel.close()
        dist.barrier()

    @torch.no_grad()
    def _restore(self) -> None:
        """Apply the state that `load_state_dict` got, if any, including the traffic counted until the checkpoint."""
        state = self._restored
        if state is None:
            return
        self._restored = None
        saved = [*state["parameters"], *state["buffers"]]
        for tensor, value in zip([*self._parameters, *self._buffers], saved, strict=True):
            tensor.copy_(value)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        self._channel.load_state_dict(state["channel"])
        self._num_steps = state["num_steps"]
        self._transport.traffic.update(from_dicts(state["traffic"]))
        self._stage.sent_bytes.update(state["links"])

    def _enter(self, state: DeviceState) -> None:
        if state != _NEXT[self.state]:
            raise RuntimeError(f"a device that is in state {self.state} cannot go to {state}")
        self.state = state

    def _train(self, step: Step, lr: float) -> None:
        self._enter("compute")
        cpu_began = time.process_time()
        self._channel.start_step(step)
        self._compute()
        self._enter("done")
        computed = time.perf_counter()
        if self._config.trigger == "sync":
            tell(self._transport, HOST_RANK, {"done": step.index})
            hear(self._transport, HOST_RANK)
        self._enter("reduce")
        outcome = self._reduce(step)
        reduced_s, exposed_before_s = time.perf_counter() - computed, self._channel.exposed_s
        self._enter("updated")
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            if not outcome.skipped:
                self._optimizer.step()
                outcome.add(self._channel.finish_step())
            self._optimizer.zero_grad(set_to_none=self._in_pool is None)
        outcome.exposed_s = reduced_s + self._channel.exposed_s - exposed_before_s  # includes the optimizer's waiting
        report = {name: getattr(outcome, name) or 0.0 for name in ("encode_s", "exchange_s", "exposed_s")}
        encoded = [vars(part) | {"layer": part.layer.id} for part in outcome.encoded if self._replica == 0]
        tell(self._transport, HOST_RANK, report | {"encoded": encoded})
        self._num_steps += 1
        self._num_steps_here += 1
        if self._num_steps_here > self._config.warmup_steps:
            self._cpu_s.append(time.process_time() - cpu_began)
        self._enter("wait")

    def _compute(self) -> None:
        """Run forward and backward; the device that computes the loss sends it to the host after forward.

        A straggler then sleeps until it is as slow as configured.
        """
        device = self._stage.device
        x = receive_tensor(self._transport, HOST_RANK, device)[0] if self._stage.takes_input else None
        y = receive_tensor(self._transport, HOST_RANK, device)[0] if self._stage.makes_result else None

        started, waited_before = time.perf_counter(), self._transport.traffic["activation"].seconds
        loss = self._stage.forward(x, lambda logits: nn.functional.cross_entropy(logits, cast(torch.Tensor, y)))
        if loss is not None:
            tell(self._transport, HOST_RANK, {"loss": float(loss)})
        self._stage.backward()
        waited = self._transport.traffic["activation"].seconds - waited_before
        time.sleep((self._slowdown - 1) * max(0.0, time.perf_counter() - started - waited))

    def _reduce(self, step: Step) -> StepReport:
        """Replace every parameter's gradient with its mean over replicas, and ask the host whether to skip the step."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        nonfinite = [zero_nonfinite_(gradient, self._config.nonfinite) for gradient in gradients]
        if self._in_pool is not None:
            self._channel.average_(self._in_pool)
        elif self._averages:
            self._channel.mean_(gradients)
        tell(self._transport, HOST_RANK, {"nonfinite": any(nonfinite)})
        skipped = hear(self._transport, HOST_RANK)["skip"]
        if skipped:
            self._channel.drop()
        if skipped and self._config.nonfinite == "raise":
            raise NonFiniteGradient(f"a gradient was not finite at step {step.index}")
        return StepReport(skipped=skipped, encode_s=0.0, exchange_s=0.0)

    def _gradients_in_pool(self) -> torch.Tensor | None:
        """Place all gradients in pool memory, which other devices read without a copy.

        Return that memory as one flat tensor; None if gradients are compressed or the collective is not `pool`.
        """
        pool = self._channel.collective
        if not isinstance(pool, BoundPool) or self._channel.reducer.compressor.component_name != "none":
            return None
        sizes = [parameter.numel() for parameter in self._parameters]
        flat = pool.buffer(sum(sizes))
        for parameter, part in zip(self._parameters, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        return flat

    def _report(self) -> None:
        """Send this device's figures, parameters and buffers to the host, and receive the averaged buffers."""
        figures = {
            "traffic": as_dicts(self._transport.traffic),
            "links": dict(self._stage.sent_bytes),
            "residual_norms": self._channel.residual_norms(),
            "weights": weights_hash(self._parameters),
            "cpu_s_per_step": statistics.fmean(self._cpu_s) if self._cpu_s else None,
            "peak_rss_bytes": peak_rss_bytes(),
        }
        tell(self._transport, HOST_RANK, figures)
        self._cpu_s.clear()
        if self._replica == 0:
            send_all(self._transport, HOST_RANK, list(self._parameters))
        send_all(self._transport, HOST_RANK, self._buffers)
        receive_all_(self._transport, HOST_RANK, self._buffers)
