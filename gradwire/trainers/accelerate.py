"""`GradwireHandler` and `GradwireLocalHandler`: compressed gradients, or local steps, with Accelerate.

    accelerator = Accelerator()
    handler = GradwireHandler(accelerator, "group_topk:ratio=0.01", "allgather", optimizer=optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ...
    handler.close()

`examples/train_accelerate.py` is a complete script.
"""

import abc
import copy
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.utils import DDPCommunicationHookType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from collectives.base import Collective
from compressors.base import Compressor
from gradwire.ddp.attach import attach
from gradwire.ddp.hook import CompressionHook
from gradwire.local.attach import attach_local
from gradwire.trainers.rank_hook import FP16_REFUSED, RankHook, rank_file


class _Handler(abc.ABC):
    """Lets an accelerator save and load the state of each rank together with the accelerator's own state."""

    state: RankHook

    def __init__(
        self, accelerator: Accelerator, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    ) -> None:
        check(accelerator)
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if any(hasattr(each, "optimizer") for each in self._optimizers):
            name = type(self).__name__
            raise ValueError(f"this optimizer is prepared already; create {name} before accelerator.prepare")

    def close(self) -> None:
        """Close the hook after training, so that another model can be prepared; every rank must call this method."""
        self.state.hook.close()

    def serve(self, accelerator: Accelerator) -> None:
        """Take part in the accelerator's `save_state` and `load_state`, in place of an earlier handler."""
        if accelerator not in _FILES:
            _FILES[accelerator] = _RankFiles(accelerator)
        _FILES[accelerator].handler = self

    def save(self, models: list[nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        """Write this rank's state."""
        self.state.save(rank_file(folder))

    def load(self, folder: str) -> None:
        """Load this rank's state."""
        self.state.load(self.state.read(rank_file(folder)))


class GradwireHandler(_Handler):
    """Sends the gradients of the model that `accelerator.prepare` wraps through a compressor and a collective.

    This handler takes the place of `accelerator.ddp_handler` and keeps that handler's options of DDP. A step in which a
    rank's gradient is not finite is skipped on all ranks. `accelerator.save_state` also writes each rank's state, as
    `gradwire-RANK.safetensors`, and `load_state` loads it. An earlier handler of the accelerator is closed.

    Args:
        accelerator: the accelerator, before it has prepared the model.
        compressor: an instance, or a spec such as "group_topk:ratio=0.01".
        collective: an instance, or a spec such as "ring"; None: the compressor's default.
        optimizer: the optimizer or optimizers, before they are prepared.
        attach_options: further keyword arguments of `attach`.

    Raises:
        ValueError: the accelerator does not use DDP, uses fp16 or has a communication hook; an optimizer is prepared
            already. `prepare` raises ValueError for what `attach` refuses.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        compressor: Compressor | str,
        collective: Collective | str | None = None,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        **attach_options: Any,
    ) -> None:
        super().__init__(accelerator, optimizer)
        earlier = accelerator.ddp_handler
        if isinstance(earlier, GradwireHandler):  # of an earlier training, which an exception may have ended
            if earlier._state is not None:
                earlier.close()
            earlier = earlier._ddp_options
        self._ddp_options: Any = earlier or DistributedDataParallelKwargs()
        if getattr(self._ddp_options, "comm_hook", None) not in (DDPCommunicationHookType.NO, "no"):
            raise ValueError("this Accelerator has a communication hook already; create it without comm_hook")
        self._arguments = {"compressor": compressor, "collective": collective, "optimizer": optimizer, **attach_options}
        self._state: RankHook | None = None
        accelerator.ddp_handler = self
        self.serve(accelerator)

    @property
    def state(self) -> RankHook:  # type: ignore[override]  # there is none at first
        """Return the state of the prepared model.

        Raises:
            RuntimeError: no model is prepared yet.
        """
        if self._state is None:
            raise RuntimeError("no model is prepared yet; call accelerator.prepare(model, optimizer, ...) first")
        return self._state

    @property
    def hook(self) -> CompressionHook:
        """Return the prepared model's hook, for example to call `set_epoch`; RuntimeError if no model is prepared."""
        return cast(CompressionHook, self.state.hook)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options of DDP; Accelerate calls this method."""
        return {"gradient_as_bucket_view": True, **self._ddp_options.to_kwargs()}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Attach the compressor to the model; Accelerate calls this method.

        Raises:
            ValueError: the hook of another model is still open, or `attach` refuses this model.
        """
        if self._state is not None and not self._state.hook.guard.closed:
            raise ValueError(
                "GradwireHandler serves one model at a time; close() it before you prepare another one, or wrap the "
                "other one in DistributedDataParallel yourself and call attach"
            )
        self._state = RankHook(attach(model, **self._arguments))


class GradwireLocalHandler(_Handler):
    """Trains a model with local steps, without DDP; prepare the model and its optimizers as usual afterwards.

    Evaluate and save the model in a block `with handler.hook.outer():`. `accelerator.save_state` saves the outer copy,
    and beside it the state of each rank and its optimizers, as `gradwire-RANK.safetensors`; `load_state` loads these
    files.

    Args:
        accelerator: the accelerator.
        model: the network, before it is prepared.
        compressor: an instance, or a spec such as "group_topk:ratio=0.01".
        collective: an instance, or a spec such as "ring"; None: the compressor's default.
        optimizer: the optimizer or optimizers, before they are prepared.
        attach_options: further keyword arguments of `attach_local`.

    Attributes:
        hook: the hook.

    Raises:
        ValueError: the accelerator has one process, shards the model or uses fp16; the model or an optimizer is
            prepared already; or `attach_local` refuses the model or an option.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        compressor: Compressor | str = "none",
        collective: Collective | str | None = None,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        **attach_options: Any,
    ) -> None:
        super().__init__(accelerator, optimizer)
        if isinstance(model, DistributedDataParallel):
            raise ValueError("this model is prepared already; create GradwireLocalHandler before accelerator.prepare")
        self._model = accelerator.prepare_model(model, evaluation_mode=True)  # not in DDP, not even after `prepare`
        self.hook = attach_local(self._model, self._optimizers, compressor, collective, **attach_options)
        self.state = RankHook(self.hook, self._optimizers)
        self.serve(accelerator)

    @override
    def save(self, models: list[nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        with self.state.outer():  # Accelerate saves the outer copy, in place of this rank's own weights
            weights[models.index(self._model)] = copy.deepcopy(self._model.state_dict())
        super().save(models, weights, folder)


class _RankFiles:
    """Lets an accelerator save and load the state of its last handler.

    Accelerate calls hooks before it loads the model and the optimizers, and calls `load_state_dict` of registered
    objects afterwards.
    """

    handler: _Handler

    def __init__(self, accelerator: Accelerator) -> None:
        accelerator.register_save_state_pre_hook(lambda *given: self.handler.save(*given))
        accelerator.register_load_state_pre_hook(self._remember)
        accelerator.register_for_checkpointing(self)

    def _remember(self, _: object, folder: str) -> None:
        self._folder = folder

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        self.handler.load(self._folder)


_FILES: "weakref.WeakKeyDictionary[Accelerator, _RankFiles]" = weakref.WeakKeyDictionary()


def check(accelerator: Accelerator) -> None:
    """Raise an error if an accelerator has one process, shards models or scales gradients.

    Raises:
        ValueError: the accelerator has one process, does not use DDP, or uses fp16.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        raise ValueError("there is only one process; start several with torchrun or accelerate launch")
    if kind != DistributedType.MULTI_CPU and not accelerator.multi_device:
        raise ValueError(f"every rank must hold the whole model, as in DDP, and this Accelerator uses {kind.value}")
    if accelerator.mixed_precision == "fp16":
        raise ValueError(FP16_REFUSED)
