"""Train on handwritten digits in Lightning's Trainer with compressed gradients; needs `gradwire[lightning]`.

    torchrun --nproc-per-node 2 examples/train_lightning.py
    torchrun --nproc-per-node 2 examples/train_lightning.py --resume checkpoints/lightning/last.ckpt --epochs 20

Only the lines marked with (*) differ from plain Lightning.
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from train_digits import accuracy_of, digits, network

from gradwire.trainers.lightning import GradwireDDPStrategy  # (*)


class Digits(LightningModule):
    """A network that is trained with gradient descent."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, pair: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.network(pair[0]), pair[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    """Train, and print the accuracy and the bytes that each rank sent."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", help="checkpoint to continue from")
    options = parser.parse_args()
    seed_everything(1)
    train, test = digits()
    model = Digits()
    strategy = GradwireDDPStrategy("group_topk:ratio=0.02", "allgather")  # (*)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=options.epochs,
        callbacks=[ModelCheckpoint(dirpath="checkpoints/lightning", save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(train, 32, shuffle=True, drop_last=True), ckpt_path=options.resume)
    if trainer.is_global_zero:
        sent = strategy.hook.traffic["gradient"].nbytes  # (*)
        print(f"accuracy {accuracy_of(model.network, test):.1%} after {trainer.global_step} steps; "
              f"each rank sent {sent:,} bytes")  # fmt: skip


if __name__ == "__main__":
    main()
