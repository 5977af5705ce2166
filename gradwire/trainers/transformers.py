"""`GradwireCallback` and `GradwireLocalCallback`: compressed gradients, or local steps, in transformers' `Trainer`.

    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(GradwireCallback(trainer, "group_topk:ratio=0.01", "allgather"))
    trainer.train()

`examples/train_trainer.py` is a complete script.
"""

import abc
import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from collectives.base import Collective
from compressors.base import Compressor
from gradwire.ddp.attach import attach
from gradwire.ddp.hook import CompressionHook
from gradwire.exchange.packed_state import bits_hash
from gradwire.local.attach import LocalHook, attach_local
from gradwire.trainers.accelerate import check
from gradwire.trainers.rank_hook import RankHook, rank_file


class _RankCallback(TrainerCallback, abc.ABC):
    """Attaches a hook at the beginning of each training, and saves the state of each rank in every checkpoint."""

    hook: CompressionHook | LocalHook | None = None
    _state: RankHook | None = None  # of this rank

    def __init__(
        self,
        trainer: Trainer,
        compressor: Compressor | str,
        collective: Collective | str | None = None,
        **attach_options: Any,
    ) -> None:
        check(trainer.accelerator)
        self._trainer = trainer  # because callbacks get the model without DDP around it
        self._arguments = {"compressor": compressor, "collective": collective, **attach_options}

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._trainer.optimizer.optimizer  # inside Accelerate's wrapper
        return optimizer

    @abc.abstractmethod
    def _attach(self) -> None:
        """Attach a hook, and set `hook` and `_state`."""

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if sum(isinstance(each, _RankCallback) for each in self._trainer.callback_handler.callbacks) > 1:
            raise ValueError("this trainer has two callbacks of gradwire; remove one with trainer.remove_callback")
        if self._state is not None:
            self._state.hook.close()  # an exception may have ended the last training
        self._attach()
        assert self._state is not None
        if state.global_step > 0:
            path = rank_file(args.resume_from_checkpoint or _checkpoint(args, state))
            own = self._state.read(path)
            if own["weights"] != bits_hash(self._trainer.model.parameters()):
                raise ValueError(
                    f"{path} belongs to other weights than those that were loaded; "
                    "name the folder in TrainingArguments(resume_from_checkpoint=...), too"
                )
            self._state.load(own)

    @override
    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.hook is not None
        self.hook.set_epoch(int(state.epoch or 0))

    @override
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self._state is not None
        self._state.save(rank_file(_checkpoint(args, state)), weights=bits_hash(self._trainer.model.parameters()))

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._state is not None
        self._state.hook.close()


class GradwireCallback(_RankCallback):
    """Sends the gradients of a Trainer's model through a compressor and a collective.

    A step in which a rank's gradient is not finite is skipped on all ranks. `set_epoch` is called before each epoch.
    Each call of `train` begins with a new hook, also after an exception or with another batch size. Each rank saves its
    state in every checkpoint, as `gradwire-RANK.safetensors`. Training resumes from `checkpoint-STEP` in `output_dir`,
    or from the folder that `TrainingArguments.resume_from_checkpoint` names.

    Args:
        trainer: the trainer, before it trains.
        compressor: an instance, or a spec such as "group_topk:ratio=0.01".
        collective: an instance, or a spec such as "ring"; None: the compressor's default.
        attach_options: further keyword arguments of `attach`.

    Attributes:
        hook: the hook of the last training, which is closed when `train` returns; None before any training.

    Raises:
        ValueError: the trainer does not use DDP, or uses fp16. `train` raises ValueError for what `attach` refuses, for
            a second callback of this kind, and if a rank's state is missing from the checkpoint.
    """

    hook: CompressionHook | None = None

    def __init__(
        self,
        trainer: Trainer,
        compressor: Compressor | str,
        collective: Collective | str | None = None,
        **attach_options: Any,
    ) -> None:
        super().__init__(trainer, compressor, collective, **attach_options)
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
        self._forget_evaluation()

    def _forget_evaluation(self) -> None:
        # An evaluation before `train` marks the model as prepared, and Accelerate would then not put it into DDP.
        vars(self._trainer.model).pop("_is_accelerate_prepared", None)

    @override
    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._forget_evaluation()

    @override
    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        self._forget_evaluation()

    @override
    def _attach(self) -> None:
        self.hook = attach(self._trainer.model_wrapped, optimizer=self._optimizer, **self._arguments)
        self._state = RankHook(self.hook)
        self._trainer.model_wrapped = self._trainer.model  # the next training wraps it again


class GradwireLocalCallback(_RankCallback):
    """Trains a Trainer's model with local steps; the model is not put into DDP.

    `evaluate`, `predict`, `save_model` and checkpoints use the outer copy, which is equal on all ranks. Each rank saves
    its state and its optimizer's state in every checkpoint, as `gradwire-RANK.safetensors`; training resumes as with
    `GradwireCallback`. `average_tokens_across_devices` is set to False, because it would exchange a number in every
    step. Logged losses are means over ranks, exchanged every `logging_steps` steps.

    Args:
        trainer: the trainer, before it trains.
        compressor: an instance, or a spec such as "group_topk:ratio=0.01".
        collective: an instance, or a spec such as "ring"; None: the compressor's default.
        attach_options: further keyword arguments of `attach_local`.

    Attributes:
        hook: the hook of the last training, which is closed when `train` returns; None before any training.

    Raises:
        ValueError: the trainer has one process, shards the model or uses fp16. `train` raises ValueError for what
            `attach_local` refuses, and if a rank's state is missing from the checkpoint.
    """

    hook: LocalHook | None = None

    def __init__(
        self,
        trainer: Trainer,
        compressor: Compressor | str = "none",
        collective: Collective | str | None = None,
        **attach_options: Any,
    ) -> None:
        super().__init__(trainer, compressor, collective, **attach_options)
        trainer.args.average_tokens_across_devices = False
        trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)  # `train` does not put it into DDP then
        for name in ("evaluate", "predict", "save_model"):
            setattr(trainer, name, self._with_outer_copy(getattr(trainer, name)))

    def _with_outer_copy(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with contextlib.nullcontext() if self._state is None else self._state.outer():
                return method(*args, **kwargs)

        return wrapped

    @override
    def _attach(self) -> None:
        self.hook = attach_local(self._trainer.model, self._optimizer, **self._arguments)
        self._state = RankHook(self.hook, [self._optimizer])

    @override
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self._state is not None
        with self._state.outer():
            super().on_save(args, state, control, **kwargs)

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = self._trainer.model
        best = copy.deepcopy(model.state_dict()) if args.load_best_model_at_end else None  # loaded just now
        super().on_train_end(args, state, control, **kwargs)
        if best is not None:
            model.load_state_dict(best)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")
