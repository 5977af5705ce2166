"""The state that one rank keeps in a trainer, and the rank's file with this state beside each checkpoint.

Every rank needs its own file, because trainers save only the state of rank 0, and hooks differ between ranks. With
local steps the optimizers differ, too.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from collectives.transport.process_group import gather_json
from gradwire.ddp.hook import CompressionHook
from gradwire.exchange.packed_state import PackedState, load_state
from gradwire.local.attach import LocalHook

FP16_REFUSED = (
    "fp16 with a gradient scaler is not supported here; train in bf16, or give the scaler to attach in a training loop "
    "of your own"
)


class RankHook:
    """The hook of one rank and, with local steps, the optimizers of the same rank.

    Args:
        hook: the object that `attach` or `attach_local` returned.
        optimizers: the optimizers whose state differs between ranks.

    Attributes:
        hook: the argument.
    """

    def __init__(self, hook: CompressionHook | LocalHook, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self.hook = hook
        self._optimizers = optimizers

    def outer(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a model with local steps has the parameters that are equal on all ranks.

        These parameters are called the outer copy. Without local steps, and after the hook was closed, the context does
        nothing.
        """
        if isinstance(self.hook, LocalHook) and not self.hook.guard.closed:
            return self.hook.outer()
        return contextlib.nullcontext()

    def save(self, path: Path, **more: Any) -> None:
        """Write the state, and the values in `more`, to this rank's file; an older file is replaced atomically."""
        hook, optimizers = self.hook.state_dict(), [each.state_dict() for each in self._optimizers]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        PackedState({"hook": hook, "optimizers": optimizers, **more}).save(partial)
        partial.replace(path)

    def read(self, path: Path) -> dict[str, Any]:
        """Return the contents of this rank's file; every rank must call this method.

        Raises:
            ValueError: a rank has no file, or the files were not saved at the same step.
        """
        saved: dict[str, Any] = load_state(path, self.hook.transport.device) if path.is_file() else {}
        steps = gather_json(saved["hook"]["step"] if saved else None)
        if None in steps:
            raise ValueError(
                f"there is no state of rank {steps.index(None)} beside {path}; resume from a checkpoint of as many "
                "ranks, or load only its weights"
            )
        if len(set(steps)) > 1:
            raise ValueError(
                f"the files of the ranks beside {path} are of steps {steps}; resume from another checkpoint"
            )
        return saved

    def load(self, saved: dict[str, Any]) -> None:
        """Replace the state, and with local steps also the model's parameters, with what `read` returned."""
        for optimizer, own in zip(self._optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        self.hook.load_state_dict(saved["hook"])


def rank_file(folder: str | os.PathLike[str], checkpoint: str = "") -> Path:
    """Return the path of this rank's file in a folder; `checkpoint` names the checkpoint, if the folder has several."""
    return Path(folder, f"gradwire-{dist.get_rank()}{'-' if checkpoint else ''}{checkpoint}.safetensors")
