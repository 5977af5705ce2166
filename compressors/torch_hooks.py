"""PyTorch's own communication hooks as compressors, for comparison: `torch_bf16`, `torch_fp16`, `torch_powersgd`.

These classes do not encode. `hook` is registered with DistributedDataParallel. Bytes are computed from a formula,
because the backend does not report what it sends.
"""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

import torch.distributed as dist
from annotated_types import Ge, Le
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from typing_extensions import Doc, override

from collectives.options import MOST, Count, CountOrZero, Positive
from compressors.base import FP32_BYTES, DDPHook, TorchHook, Traits
from compressors.layer import Layer
from compressors.powersgd import matrix_shape


@dataclasses.dataclass(kw_only=True)
class TorchBf16(TorchHook, name="torch_bf16"):
    """PyTorch's bf16 hook: divides by the number of ranks, rounds to bf16 and all-reduces.

    Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook, unchanged.

    Bytes: 2 m for a bucket of m elements, all-reduced by the backend.
    """

    value_nbytes: ClassVar[int] = 2

    @override
    def hook(self, process_group: dist.ProcessGroup) -> tuple[object, DDPHook]:
        return process_group, default_hooks.bf16_compress_hook


@dataclasses.dataclass(kw_only=True)
class TorchFp16(TorchHook, name="torch_fp16"):
    """PyTorch's fp16 hook: divides by the number of ranks, rounds to fp16 and all-reduces.

    Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook, unchanged.

    Bytes: 2 m for a bucket of m elements, all-reduced by the backend.
    """

    value_nbytes: ClassVar[int] = 2

    @override
    def hook(self, process_group: dist.ProcessGroup) -> tuple[object, DDPHook]:
        return process_group, default_hooks.fp16_compress_hook


# Attributes of PowerSGDState that hold tensors per bucket; a checkpoint needs these and the number of steps.
_PER_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")
_SAVED = (*_PER_BUCKET, "iter")


@dataclasses.dataclass(kw_only=True)
class TorchPowerSgd(TorchHook, name="torch_powersgd"):
    """PyTorch's PowerSGD hook: all-reduces two thin factors of every matrix.

    Source: torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook, unchanged.

    The state of the hook belongs to buckets. DDP rebuilds them after the first step, so compression starts later.

    Bytes: the backend all-reduces 4 m for a bucket of m elements before start_step; then 4 (sum of r (n + k) over
    its matrices [n, k], of rank r, + elements not compressed).
    """

    rank: Annotated[Count, Doc("columns of the two thin matrices")] = 2
    min_compression_rate: Annotated[Positive, Doc("compress where n k / (r (n + k)) exceeds this")] = 2.0
    warm_start: Annotated[bool, Doc("start from the last step's factors; false: start from random ones")] = True
    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True
    start_step: Annotated[int, Ge(2), Le(MOST), Doc("first optimizer step that is compressed")] = 2
    seed: Annotated[CountOrZero, Doc("seed of the random factors")] = 0

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, dense_steps=self.start_step)

    @override
    def hook(self, process_group: dist.ProcessGroup) -> tuple[object, DDPHook]:
        state = powersgd.PowerSGDState(
            process_group=process_group,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=self.start_step,
            min_compression_rate=self.min_compression_rate,
            use_error_feedback=self.error_feedback,
            warm_start=self.warm_start,
            orthogonalization_epsilon=1e-8,  # with the default 0, a gradient of zeros becomes NaN
            random_seed=self.seed,
            batch_tensors_with_same_shape=True,
        )
        return state, powersgd.powerSGD_hook

    @override
    def state_of(self, state: Any) -> dict[str, Any]:
        _, words, *rest = state.rng.get_state()
        return {name: getattr(state, name) for name in _SAVED} | {"rng": [words.tolist(), *rest]}

    @override
    def restore(self, state: Any, saved: dict[str, Any]) -> None:
        for name in _SAVED:
            setattr(state, name, saved[name])
        state.rng.set_state(("MT19937", *saved["rng"]))

    @override
    def forget(self, state: Any) -> None:
        for name in _PER_BUCKET:
            getattr(state, name).clear()

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        # both factors; or the layer in fp32 if the factors are not small enough
        if len(layer.shape) < 2 or layer.numel == 0:
            return FP32_BYTES * layer.numel
        num_rows, num_columns = matrix_shape(layer)
        factors = min(self.rank, num_rows, num_columns) * (num_rows + num_columns)
        return FP32_BYTES * (factors if factors * self.min_compression_rate < layer.numel else layer.numel)
