"""Train on handwritten digits in the Trainer of transformers with compressed gradients; needs `gradwire[transformers]`.

    torchrun --nproc-per-node 2 examples/train_trainer.py
    torchrun --nproc-per-node 2 examples/train_trainer.py --resume --epochs 20

Only the lines marked with (*) differ from the plain Trainer.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from train_digits import accuracy_of, digits, network
from transformers import Trainer, TrainingArguments, set_seed

from gradwire.trainers.transformers import GradwireCallback  # (*)


class Digits(nn.Module):
    """A network that returns its loss, as the Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch."""
        return {"loss": nn.functional.cross_entropy(self.network(x), labels)}


def main() -> None:
    """Train, and print the accuracy and the bytes that each rank sent."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args()
    set_seed(1)
    train, test = digits()
    model = Digits()
    arguments = TrainingArguments(
        "checkpoints/trainer",
        use_cpu=True,
        ddp_find_unused_parameters=False,
        per_device_train_batch_size=32,
        num_train_epochs=options.epochs,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        optim_args="momentum=0.9",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"x": x, "labels": y} for x, y in train])
    callback = GradwireCallback(trainer, "group_topk:ratio=0.02", "allgather")  # (*)
    trainer.add_callback(callback)  # (*)
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        sent = callback.hook.traffic["gradient"].nbytes  # (*)
        print(f"accuracy {accuracy_of(model.network, test):.1%} after {trainer.state.global_step} steps; "
              f"each rank sent {sent:,} bytes")  # fmt: skip


if __name__ == "__main__":
    main()
