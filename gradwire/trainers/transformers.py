"""`GradwireCallback`: compressed gradients in the `Trainer` of transformers.

    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(GradwireCallback(trainer, "group_topk:ratio=0.01", "allgather"))
    trainer.train()

`examples/train_trainer.py` is a complete script.
"""

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from collectives.base import Collective
from compressors.base import Compressor
from gradwire.ddp.attach import attach
from gradwire.ddp.hook import CompressionHook
from gradwire.exchange.packed_state import bits_hash
from gradwire.trainers.accelerate import check
from gradwire.trainers.rank_files import load_rank, rank_file, save_rank


class GradwireCallback(TrainerCallback):
    """Sends the gradients of a Trainer's model through a compressor and a collective.

    A step in which a rank's gradient is not finite is skipped on all ranks. `set_epoch` is called before each epoch.
    Each `train` begins with a hook of its own, also after an exception and with another batch size.
    Each rank saves its state in every checkpoint, as `gradwire-RANK.safetensors`. Training resumes from
    `checkpoint-STEP` in `output_dir`, or from the folder that `TrainingArguments.resume_from_checkpoint` names.

    Args:
        trainer: the trainer, before it trains.
        compressor: an instance, or a spec such as "group_topk:ratio=0.01".
        collective: an instance, or a spec such as "ring".
        attach_options: further keyword arguments of `attach`.

    Attributes:
        hook: the hook of the last training, which is closed when `train` returns; None before.

    Raises:
        ValueError: the trainer does not use DDP, or uses fp16. `train` raises it for what `attach` refuses, for a
            second callback of this kind, and if the checkpoint has no state of a rank.
    """

    hook: CompressionHook | None = None

    def __init__(
        self, trainer: Trainer, compressor: Compressor | str, collective: Collective | str, **attach_options: Any
    ) -> None:
        check(trainer.accelerator)
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
        self._trainer = trainer  # callbacks see the model without DDP around it
        self._attach_arguments = compressor, collective, attach_options
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
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        compressor, collective, options = self._attach_arguments
        if self.hook is not None:
            self.hook.close()  # an exception may have ended the last training
        if self._trainer.model_wrapped is self._trainer.model:
            raise ValueError("this trainer has two GradwireCallbacks; remove one with trainer.remove_callback")
        optimizer = self._trainer.optimizer.optimizer  # inside Accelerate's
        self.hook = attach(self._trainer.model_wrapped, compressor, collective, optimizer=optimizer, **options)
        self._trainer.model_wrapped = self._trainer.model  # the next training, whatever ends this one, wraps it anew
        if state.global_step > 0:
            path = rank_file(args.resume_from_checkpoint or _checkpoint(args, state))
            if load_rank(self.hook, path)["weights"] != bits_hash(self._trainer.model.parameters()):
                # The callback is not told which folder the trainer resumes from.
                raise ValueError(
                    f"{path} belongs to other weights than those that were loaded; "
                    "name the folder in TrainingArguments(resume_from_checkpoint=...), too"
                )

    @override
    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.hook is not None
        self.hook.set_epoch(int(state.epoch or 0))

    @override
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.hook is not None
        weights = bits_hash(self._trainer.model.parameters())
        save_rank({**self.hook.state_dict(), "weights": weights}, rank_file(_checkpoint(args, state)))

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.hook is not None
        self.hook.close()


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")
