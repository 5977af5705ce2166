"""Train on handwritten digits with Accelerate and compressed gradients; needs `gradwire[accelerate]`.

    torchrun --nproc-per-node 2 examples/train_accelerate.py
    torchrun --nproc-per-node 2 examples/train_accelerate.py --resume --epochs 20

Only the lines marked with (*) differ from plain Accelerate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from train_digits import accuracy_of, digits, network

from gradwire.trainers.accelerate import GradwireHandler  # (*)

CHECKPOINTS = Path("checkpoints/accelerate")


def main() -> None:
    """Train, and print the accuracy and the bytes that each rank sent."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args()
    set_seed(1)
    train, test = digits()
    model, loader = network(), DataLoader(train, 32, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    accelerator = Accelerator(cpu=True)
    handler = GradwireHandler(accelerator, "group_topk:ratio=0.02", "allgather", optimizer=optimizer)  # (*)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    first_epoch = 0
    if options.resume:
        last = max(CHECKPOINTS.glob("epoch-*"))
        accelerator.load_state(str(last))
        first_epoch = int(last.name.removeprefix("epoch-"))
    for epoch in range(first_epoch, options.epochs):
        loader.set_epoch(epoch)
        handler.hook.set_epoch(epoch)  # (*) some compressors send more in their first epochs
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(str(CHECKPOINTS / f"epoch-{epoch + 1:04d}"))

    sent = handler.hook.traffic["gradient"].nbytes  # (*)
    handler.close()  # (*)
    accelerator.print(
        f"accuracy {accuracy_of(accelerator.unwrap_model(model), test):.1%} after epoch {options.epochs}; "
        f"each rank sent {sent:,} bytes"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
