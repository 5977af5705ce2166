"""PyTorch's PowerSGD hook.

Source: torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import torch.distributed as dist
from annotated_types import Ge, Le
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from typing_extensions import Doc, override

from collectives.ranges import MOST, Count, CountOrZero, Positive
from compressors.base import FP32_BYTES
from compressors.families.torch_comm_hook import DDPHook, TorchCommHook
from compressors.layer import Layer

# What the hook keeps by bucket, and how many steps it has seen.
_OF_BUCKETS = ("error_dict", "p_memory_dict", "q_memory_dict")
_KEPT = (*_OF_BUCKETS, "iter")


@dataclasses.dataclass(kw_only=True)
class TorchPowerSgd(TorchCommHook):
    """The hook as it is. Its state belongs to buckets, which change after the first step, so it starts later.

    Bytes: 4 (sum of r (n + k) + elements not compressed) for a bucket of matrices [n, k], all-reduced by the backend;
    4 m before start_step.
    """

    rank: Annotated[Count, Doc("columns of the two thin matrices")] = 2
    min_compression_rate: Annotated[Positive, Doc("compress where n k / (r (n + k)) exceeds this")] = 2.0
    warm_start: Annotated[bool, Doc("go on from the last step's factors; else draw them anew")] = True
    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True
    start_step: Annotated[int, Ge(2), Le(MOST), Doc("first step that is compressed")] = 2
    seed: Annotated[CountOrZero, Doc("of the random start")] = 0

    @override
    def is_dense_at(self, step_index: int) -> bool:
        return step_index < self.start_step

    @override
    def hook(self, process_group: dist.ProcessGroup) -> tuple[object, DDPHook]:
        state = powersgd.PowerSGDState(
            process_group=process_group,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=self.start_step,
            min_compression_rate=self.min_compression_rate,
            use_error_feedback=self.error_feedback,
            warm_start=self.warm_start,
            orthogonalization_epsilon=1e-8,  # 0, its default, makes NaN of a gradient of zeros
            random_seed=self.seed,
            batch_tensors_with_same_shape=True,
        )
        return state, powersgd.powerSGD_hook

    @override
    def state_of(self, state: Any) -> dict[str, Any]:
        _, words, *rest = state.rng.get_state()
        return {name: getattr(state, name) for name in _KEPT} | {"rng": [words.tolist(), *rest]}

    @override
    def restore(self, state: Any, saved: dict[str, Any]) -> None:
        for name in _KEPT:
            setattr(state, name, saved[name])
        state.rng.set_state(("MT19937", *saved["rng"]))

    @override
    def num_entries(self, layer: Layer) -> int:
        return self.expected_nbytes(layer) // FP32_BYTES

    @override
    def forget(self, state: Any) -> None:
        for name in _OF_BUCKETS:
            getattr(state, name).clear()

    def expected_nbytes(self, layer: Layer) -> int:
        """Both factors, or the layer as it is where they would not shrink it enough."""
        if len(layer.shape) < 2 or layer.numel == 0:
            return FP32_BYTES * layer.numel
        num_rows = layer.shape[0]
        num_columns = layer.numel // num_rows
        factors = min(self.rank, num_rows, num_columns) * (num_rows + num_columns)
        return FP32_BYTES * (factors if factors * self.min_compression_rate < layer.numel else layer.numel)
