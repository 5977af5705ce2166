"""`GradwireHandler`: compressed gradients with Accelerate.

    accelerator = Accelerator()
    handler = GradwireHandler(accelerator, "group_topk:ratio=0.01", "allgather", optimizer=optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ...
    handler.close()

`examples/train_accelerate.py` is a complete script.
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.utils import DDPCommunicationHookType
from torch.nn.parallel import DistributedDataParallel

from collectives.base import Collective
from compressors.base import Compressor
from gradwire.ddp.attach import attach
from gradwire.ddp.hook import CompressionHook
from gradwire.trainers.rank_files import FP16_REFUSED, load_rank, rank_file, save_rank


class GradwireHandler:
    """Sends the gradients of the model that `accelerator.prepare` wraps through a compressor and a collective.

    It takes the place of `accelerator.ddp_handler` and keeps that handler's options of DDP. A step in which a rank's
    gradient is not finite is skipped on all ranks. `accelerator.save_state` also writes each rank's state, as
    `gradwire-RANK.safetensors`, and `load_state` loads it. An earlier handler of the accelerator is closed.

    Args:
        accelerator: before it has prepared the model.
        compressor: an instance, or a spec such as "group_topk:ratio=0.01".
        collective: an instance, or a spec such as "ring".
        optimizer: the optimizer or optimizers, before they are prepared.
        attach_options: further keyword arguments of `attach`.

    Raises:
        ValueError: the accelerator does not use DDP, uses fp16 or has a communication hook; an optimizer is prepared
            already. `prepare` raises it for what `attach` refuses.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        compressor: Compressor | str,
        collective: Collective | str,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        **attach_options: Any,
    ) -> None:
        check(accelerator)
        for each in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer:
            if hasattr(each, "optimizer"):
                raise ValueError(
                    "this optimizer is prepared already; create GradwireHandler before accelerator.prepare"
                )
        earlier = accelerator.ddp_handler
        if isinstance(earlier, GradwireHandler):  # of a training that has ended, perhaps with an exception
            earlier._give_way()
            earlier = earlier._ddp_options
        self._ddp_options: Any = earlier or DistributedDataParallelKwargs()
        if getattr(self._ddp_options, "comm_hook", None) not in (DDPCommunicationHookType.NO, "no"):
            raise ValueError("this Accelerator has a communication hook already; create it without comm_hook")
        self._attach_arguments = compressor, collective, {"optimizer": optimizer, **attach_options}
        self._hook: CompressionHook | None = None
        self._is_open = False
        accelerator.ddp_handler = self
        self._handles = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        ]

    @property
    def hook(self) -> CompressionHook:
        """Return the hook of the prepared model, for example to call `set_epoch`.

        Raises:
            RuntimeError: no model is prepared yet.
        """
        if self._hook is None:
            raise RuntimeError("no model is prepared yet; call accelerator.prepare(model, optimizer, ...) first")
        return self._hook

    def close(self) -> None:
        """Close the hook after training; every rank must call this method. Then another model can be prepared."""
        self.hook.close()
        self._is_open = False

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options of DDP; Accelerate calls this method."""
        return {"gradient_as_bucket_view": True, **self._ddp_options.to_kwargs()}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Attach the compressor to the model; Accelerate calls this method.

        Raises:
            ValueError: the hook of another model is open, or `attach` refuses this one.
        """
        if self._is_open:
            raise ValueError(
                "GradwireHandler serves one model at a time; close() it before you prepare another one, or wrap the "
                "other one in DistributedDataParallel yourself and call attach"
            )
        compressor, collective, options = self._attach_arguments
        self._hook = attach(model, compressor, collective, **options)
        self._is_open = True

    def _give_way(self) -> None:
        if self._hook is not None:
            self.close()
        for handle in self._handles:
            handle.remove()

    def _save(self, _: object, __: object, folder: str) -> None:
        save_rank(self.hook.state_dict(), rank_file(folder))

    def _load(self, _: object, folder: str) -> None:
        load_rank(self.hook, rank_file(folder))


def check(accelerator: Accelerator) -> None:
    """Refuse an accelerator whose model would not be in DDP, or whose gradients would be scaled.

    Raises:
        ValueError: it does not use DDP, or uses fp16.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        raise ValueError("there is only one process; start several with torchrun or accelerate launch")
    if kind != DistributedType.MULTI_CPU and not accelerator.multi_device:
        raise ValueError(f"gradients are compressed in DDP, and this Accelerator uses {kind.value}")
    if accelerator.mixed_precision == "fp16":
        raise ValueError(FP16_REFUSED)
