"""Train on handwritten digits in Lightning with local steps, which exchange little; needs `gradwire[lightning]`.

Only the lines marked with (*) differ from plain Lightning.
    torchrun --nproc-per-node 2 examples/train_lightning_local.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader
from train_digits import accuracy_of, digits, network

from gradwire.trainers.lightning import GradwireLocalStrategy  # (*)


class Digits(LightningModule):
    """A network that is trained with AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, pair: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.network(pair[0]), pair[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of each rank."""
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    seed_everything(1)
    train, test = digits()
    model = Digits()
    strategy = GradwireLocalStrategy("bf16", "ring", {"preset": "diloco", "steps": 10})  # (*)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=5, logger=False)
    trainer.fit(model, DataLoader(train, 32, shuffle=True, drop_last=True))
    if trainer.is_global_zero:
        print(f"{accuracy_of(model.network, test):.1%} with {strategy.hook.traffic['gradient'].nbytes:,} bytes")
