"""`GradwireDDPStrategy` and `GradwireLocalStrategy`: compressed gradients, or local steps, in Lightning's Trainer.

    strategy = GradwireDDPStrategy("group_topk:ratio=0.01", "allgather")
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy)
    trainer.fit(model, loader)

`examples/train_lightning.py` and `examples/train_lightning_local.py` are complete scripts.
"""

import contextlib
import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from collectives.base import Collective
from compressors.base import Compressor
from gradwire.ddp.attach import attach
from gradwire.ddp.hook import CompressionHook
from gradwire.local.attach import LocalHook, attach_local
from gradwire.trainers.rank_hook import FP16_REFUSED, RankHook, rank_file


class _RankStrategy(DDPStrategy):
    """A strategy with a hook; each rank saves the hook's state beside every checkpoint."""

    def __init__(
        self,
        compressor: Compressor | str,
        collective: Collective | str | None = None,
        attach_options: Mapping[str, Any] | None = None,
        **strategy_options: Any,
    ) -> None:
        super().__init__(**strategy_options)
        self._arguments = {"compressor": compressor, "collective": collective, **(attach_options or {})}
        self._state: RankHook | None = None  # of this rank
        self._resumed_from = Path()
        self._has_failed = False

    def _begin(self) -> None:
        """Refuse fp16 with a scaler, and close the hook of an earlier `fit`, before a new hook is attached."""
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(FP16_REFUSED)
        if self._state is not None:
            self._state.hook.close()  # an exception may have ended the last `fit`
        self._has_failed = False

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self._state is not None:
            self._state.save(_rank_file(filepath))

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        _rank_file(filepath).unlink(missing_ok=True)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._resumed_from = checkpoint_path  # there is no hook yet
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        assert self._state is not None
        self._state.load(self._state.read(_rank_file(self._resumed_from)))

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        # Closing waits for the other ranks, which may never come after a failure. The process ends soon anyway.
        if self._state is not None and not self._has_failed:
            self._state.hook.close()
        super().teardown()


class GradwireDDPStrategy(_RankStrategy):
    """Lightning's `DDPStrategy` with gradients that go through a compressor and a collective, on CPUs and GPUs.

    A step in which a rank's gradient is not finite is skipped on all ranks: its gradients become None. `set_epoch` is
    called with the module's `current_epoch`. Beside every checkpoint `NAME.ckpt` each rank saves its state as
    `gradwire-RANK-NAME.safetensors`, which `trainer.fit(..., ckpt_path=...)` loads.

    Args:
        compressor: an instance, or a spec such as "group_topk:ratio=0.01".
        collective: an instance, or a spec such as "ring"; None: the compressor's default.
        attach_options: further keyword arguments of `attach`, such as `{"momentum": 0.9}`.
        strategy_options: arguments of `DDPStrategy`, DDP's options among them.

    Attributes:
        hook: the hook of the last `fit`, which is closed when `fit` returns.

    Raises:
        ValueError: the options contain a communication hook. `fit` raises ValueError for fp16 and for what `attach`
            refuses.
    """

    hook: CompressionHook | None = None

    def __init__(
        self,
        compressor: Compressor | str,
        collective: Collective | str | None = None,
        attach_options: Mapping[str, Any] | None = None,
        **strategy_options: Any,
    ) -> None:
        for name in strategy_options:
            if name.startswith("ddp_comm_"):
                raise ValueError(f"GradwireDDPStrategy brings the communication hook of the model; leave out {name}")
        strategy_options = {"gradient_as_bucket_view": True, **strategy_options}
        super().__init__(compressor, collective, attach_options, **strategy_options)

    @override
    def _register_ddp_hooks(self) -> None:
        self._begin()
        self.hook = attach(self.model, **self._arguments)
        self._state = RankHook(self.hook)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.hook is not None
        self.hook.set_epoch(self.lightning_module.current_epoch)
        return super().training_step(*args, **kwargs)

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        # Lightning runs backward inside `optimizer.step`, after the optimizer's pre-step hooks, so call `step_ok` here.
        assert self.hook is not None
        if self.model.require_backward_grad_sync and not self.hook.step_ok():
            self.model.zero_grad(set_to_none=True)


class GradwireLocalStrategy(_RankStrategy):
    """Lightning strategy for several processes that trains with local steps, without DDP around the module.

    Every rank trains on its own part of the data. Validation, tests and checkpoints use the outer copy, which is equal
    on all ranks; metrics of training steps are those of the rank's own parameters. `set_epoch` is called with the
    module's `current_epoch`. Beside every checkpoint `NAME.ckpt` each rank saves its state and the state of its
    optimizers, as `gradwire-RANK-NAME.safetensors`, which `trainer.fit(..., ckpt_path=...)` loads.

    Args:
        compressor: an instance, or a spec such as "group_topk:ratio=0.01".
        collective: an instance, or a spec such as "ring"; None: the compressor's default.
        attach_options: further keyword arguments of `attach_local`, such as `{"preset": "diloco"}`.
        strategy_options: arguments of `DDPStrategy`, such as `timeout`, but not options of DDP.

    Attributes:
        hook: the hook of the last `fit`, which is closed when `fit` returns.

    Raises:
        ValueError: options of DDP are given. `fit` raises ValueError for fp16 and for what `attach_local` refuses.
    """

    hook: LocalHook | None = None

    def __init__(
        self,
        compressor: Compressor | str = "none",
        collective: Collective | str | None = None,
        attach_options: Mapping[str, Any] | None = None,
        **strategy_options: Any,
    ) -> None:
        known = inspect.signature(DDPStrategy).parameters
        for name in strategy_options:
            if name not in known or name.startswith(("ddp_", "model_averaging")):
                raise ValueError(f"with local steps the module is not in DDP, so {name} has no effect; leave it out")
        super().__init__(compressor, collective, attach_options, **strategy_options)
        self._evaluation = contextlib.ExitStack()

    @override
    def configure_ddp(self) -> None:
        self._begin()  # and leave the module as it is

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.hook = attach_local(self.model, self.optimizers, **self._arguments)
            self._state = RankHook(self.hook, self.optimizers)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.hook is not None
        self.hook.set_epoch(self.lightning_module.current_epoch)
        return super().optimizer_step(*args, **kwargs)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._outer():
            return copy.deepcopy(super().lightning_module_state_dict())

    @override
    def on_validation_start(self) -> None:
        self._evaluation.enter_context(self._outer())

    @override
    def on_validation_end(self) -> None:
        self._evaluation.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._evaluation.close()
        super().on_exception(exception)

    def _outer(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._state is None else self._state.outer()


def _rank_file(checkpoint: Any) -> Path:
    if "://" in str(checkpoint):
        raise ValueError(f"each rank saves its state in local folders, and {checkpoint} is not in one")
    path = Path(checkpoint).resolve()  # Lightning may have made last.ckpt a link
    return rank_file(path.parent, path.stem)
