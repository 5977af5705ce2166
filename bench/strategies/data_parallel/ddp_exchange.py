"""DDP's own all-reduce, by itself or under one of PyTorch's hooks: counted by formula, timed by DDP's own timers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collectives.base import Key
from collectives.payloads.base import Payload
from collectives.transport.base import Purpose, Traffic
from compressors.base import Compressor
from compressors.ddp.channel import Nonfinite
from compressors.ddp.report import EncodedLayer, StepReport
from compressors.families.torch_comm_hook import TorchCommHook
from compressors.layer import Layer, Step, layers_of

# DDP's own runtime timers are read once in so many steps: a reading costs as much as a small layer. An optimizer that
# exchanges something every ten steps, or five, does so in as many of those that are read as of others.
DDP_TIMER_EVERY = 7


class DdpExchange:
    """What DDP does without a hook of ours.

    Args:
        ddp: has no communication hook yet.
        compressor: one of PyTorch's own hooks, which is registered, or `none`.
        nonfinite: what to do about a non-finite gradient.
    """

    def __init__(self, ddp: DistributedDataParallel, compressor: Compressor, *, nonfinite: Nonfinite) -> None:
        self._ddp = ddp
        self._layers = layers_of(ddp.module)
        self._ddp._set_ddp_runtime_logging_sample_rate(1)
        self._torch_hook = compressor if isinstance(compressor, TorchCommHook) else None
        self._torch_state: object = None
        if self._torch_hook is not None:
            self._torch_state, torch_hook = self._torch_hook.hook(ddp.process_group)
            ddp.register_comm_hook(self._torch_state, torch_hook)
        self._gradient = Traffic(from_formula=True)
        self._nonfinite = nonfinite
        self._step_index = 0

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Gradient bytes by the ring all-reduce's formula, since the backend hides the wire."""
        return {"gradient": self._gradient, "control": Traffic(), "state": Traffic()}

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """Nothing of ours."""
        return {}

    def residual_norms(self) -> dict[int, float]:
        """DDP keeps no residuals."""
        return {}

    def start_step(self, step: Step) -> None:
        """Tell where training is; call before `backward`."""
        self._step_index = step.index

    def finish_step(self) -> StepReport:
        """Screen the reduced gradient (equal on all ranks, so no vote is needed) and read DDP's timers."""
        world_size = dist.get_world_size()
        encoded = [self._encoded(layer) for layer in self._layers]
        self._gradient.nbytes += round(2 * (world_size - 1) / world_size * sum(part.nbytes for part in encoded))
        return StepReport(skipped=self._is_skipped(), exposed_s=self._exposed_s(), encoded=encoded)

    def state_dict(self) -> dict[str, Any]:
        """What PyTorch's hook keeps; DDP by itself keeps nothing."""
        return {} if self._torch_hook is None else self._torch_hook.state_of(self._torch_state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        if self._torch_hook is not None:
            self._torch_hook.restore(self._torch_state, state)

    def close(self) -> None:
        """DDP holds nothing that outlives it."""

    def _encoded(self, layer: Layer) -> EncodedLayer:
        nbytes: float = 4 * layer.numel
        num_entries = layer.numel
        if self._torch_hook is not None and not self._torch_hook.is_dense_at(self._step_index):
            nbytes = self._torch_hook.expected_nbytes(layer) or 0
            num_entries = self._torch_hook.num_entries(layer)
        return EncodedLayer(layer=layer, payload="Dense", nbytes=nbytes, num_entries=num_entries, seconds=0.0)

    def _is_skipped(self) -> bool:
        gradients = [p.grad for p in self._ddp.parameters() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        if bool(torch.isfinite(norms).all()):
            return False
        if self._torch_hook is not None:
            self._torch_hook.forget(self._torch_state)
        if self._nonfinite == "zero":
            for gradient in gradients:
                torch.nan_to_num_(gradient, nan=0.0, posinf=0.0, neginf=0.0)
            return False
        return True

    def _exposed_s(self) -> float | None:
        if self._step_index % DDP_TIMER_EVERY != DDP_TIMER_EVERY - 1:
            return None
        assert self._ddp.logger is not None
        self._ddp.logger.set_runtime_stats_and_log()  # else the timers are of the step before this one
        timers = self._ddp._get_ddp_logging_data()
        ended, computed = timers.get("backward_comm_time_end"), timers.get("backward_compute_time_end")
        if not ended or not computed:
            return None
        return max(0, int(ended) - int(computed)) * 1e-9
