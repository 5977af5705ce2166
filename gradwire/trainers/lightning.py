"""`GradwireDDPStrategy`: compressed gradients in Lightning's Trainer.

    strategy = GradwireDDPStrategy("group_topk:ratio=0.01", "allgather")
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy)
    trainer.fit(model, loader)

`examples/train_lightning.py` is a complete script.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from collectives.base import Collective
from compressors.base import Compressor
from gradwire.ddp.attach import attach
from gradwire.ddp.hook import CompressionHook
from gradwire.trainers.rank_files import FP16_REFUSED, load_rank, rank_file, save_rank


class GradwireDDPStrategy(DDPStrategy):
    """Lightning's `DDPStrategy` with gradients that go through a compressor and a collective, on CPUs and GPUs.

    A step in which a rank's gradient is not finite is skipped on all ranks: its gradients become None. `set_epoch` is
    called with the module's `current_epoch`. Beside every checkpoint `NAME.ckpt` each rank saves its state as
    `gradwire-RANK-NAME.safetensors`, which `trainer.fit(..., ckpt_path=...)` loads.

    Args:
        compressor: an instance, or a spec such as "group_topk:ratio=0.01".
        collective: an instance, or a spec such as "ring".
        attach_options: further keyword arguments of `attach`, such as `{"momentum": 0.9}`.
        strategy_options: arguments of `DDPStrategy`, DDP's options among them.

    Attributes:
        hook: the hook of the last `fit`, which is closed when `fit` returns.

    Raises:
        ValueError: a communication hook is among the options; `fit` raises it for fp16 and what `attach` refuses.
    """

    hook: CompressionHook | None = None

    def __init__(
        self,
        compressor: Compressor | str,
        collective: Collective | str,
        attach_options: Mapping[str, Any] | None = None,
        **strategy_options: Any,
    ) -> None:
        for name in strategy_options:
            if name.startswith("ddp_comm_"):
                raise ValueError(f"GradwireDDPStrategy brings the communication hook of the model; leave out {name}")
        super().__init__(**{"gradient_as_bucket_view": True, **strategy_options})
        self._attach_arguments = compressor, collective, dict(attach_options or {})
        self._resumed_from = Path()
        self._has_failed = False

    @override
    def _register_ddp_hooks(self) -> None:
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(FP16_REFUSED)
        compressor, collective, options = self._attach_arguments
        if self.hook is not None:
            self.hook.close()  # an exception may have ended the last `fit`
        self._has_failed = False
        self.hook = attach(self.model, compressor, collective, **options)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.hook is not None
        self.hook.set_epoch(self.lightning_module.current_epoch)
        return super().training_step(*args, **kwargs)

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        # Lightning runs backward inside `optimizer.step`, after the optimizer's pre-step hooks: so ask here.
        assert self.hook is not None
        if self.model.require_backward_grad_sync and not self.hook.step_ok():
            self.model.zero_grad(set_to_none=True)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self.hook is not None:
            save_rank(self.hook.state_dict(), _rank_file(filepath))

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        _rank_file(filepath).unlink(missing_ok=True)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._resumed_from = checkpoint_path  # the model is not in DDP yet
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        assert self.hook is not None
        load_rank(self.hook, _rank_file(self._resumed_from))

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        # Closing waits for the other ranks. After a failure they may never come; the process ends soon.
        if self.hook is not None and not self._has_failed:
            self.hook.close()
        super().teardown()


def _rank_file(checkpoint: Any) -> Path:
    if "://" in str(checkpoint):
        raise ValueError(f"GradwireDDPStrategy saves each rank's state in local folders; {checkpoint} is not in one")
    path = Path(checkpoint).resolve()  # Lightning may have made last.ckpt a link
    return rank_file(path.parent, path.stem)
